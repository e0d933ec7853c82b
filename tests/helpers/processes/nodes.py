"""A Ray cluster of two nodes on this machine, as a process: `python nodes.py`. It prints its address, and a line for each order.

Orders are lines: `kill` the second node at once, `add` another one, `gpus`: add one that says it has two GPUs, `no gpus`: remove it,
`head`: kill the process that knows the cluster (Ray's GCS).
"""

import sys

from ray.cluster_utils import Cluster

ROOM = {"num_cpus": 3, "object_store_memory": 3 * 10**8}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**ROOM, "include_dashboard": False})
    second, third = cluster.add_node(**ROOM), None
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "kill\n":
            cluster.remove_node(second, allow_graceful=False)
            cluster.wait_for_nodes()  # until it is known that the second has gone
        elif line == "add\n":
            second = cluster.add_node(**ROOM)
        elif line == "gpus\n":
            third = cluster.add_node(**{**ROOM, "num_gpus": 2})
        elif line == "no gpus\n":
            cluster.remove_node(third, allow_graceful=False)
            cluster.wait_for_nodes()
        else:
            cluster.head_node.kill_gcs_server()
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
