"""A Ray cluster of two nodes on this machine, as a process: `python nodes.py`. It prints its address; a line to it kills the second."""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    room = {"num_cpus": 3, "object_store_memory": 3 * 10**8}
    cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    second = cluster.add_node(**room)
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        print("gone", flush=True)
        sys.stdin.readline()
    cluster.shutdown()


if __name__ == "__main__":
    main()
