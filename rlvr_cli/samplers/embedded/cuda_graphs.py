"""Decoding steps in a few shapes, each recorded once as a CUDA graph and replayed: one call per step, not hundreds.

Enters: a `DecodeStep` and the tensors that a batch keeps in place from step to step. Leaves: logits, in place too.

Rows and columns are rounded outward to a shape that many steps share, and the column to write is read from device
memory. Results of rows that are not in use are ignored. On a CPU, and where recording fails, the same shapes are
computed without recording.
"""

from collections.abc import Sequence

import torch

from rlvr_cli.samplers.embedded.decode_step import DecodeStep, Window

ROWS, COLUMNS = 32, 128  # rounding: coarser takes fewer recordings, finer wastes less computation


class FixedShapeStep:
    """A decoding step in fixed shapes, on the tensors of a batch, which stay in place.

    Args:
        tokens, positions: (rows, 1), of every row's newest token.
        mask: (rows, 1, 1, columns), added to attention scores; columns after the newest one are masked in any case.
        cache: keys and values of each layer, (rows, key-value heads, columns, head size).

    Attributes:
        failure: why a shape could not be recorded, in a few words; empty if all could.
    """

    def __init__(
        self,
        step: DecodeStep,
        *,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._step, self._tokens, self._positions, self._mask, self._cache = step, tokens, positions, mask, cache
        device = tokens.device
        self._newest = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = torch.arange(mask.shape[-1], device=device)
        self._logits = torch.empty(len(tokens), step.vocab_size, device=device)
        # Of this device: by default torch records on the one that was current at the process's first recording.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graphs: dict[Window, torch.cuda.CUDAGraph | None] = {}  # None for a shape that could not be recorded
        self.failure = ""

    def __call__(self, window: Window, *, rows: int | None = None, columns: int | None = None) -> torch.Tensor:
        """Run a step on at least this window, whose last column is the one to write.

        Args:
            rows, columns: that the batch uses, at most those of the tensors; by default all of them. Shapes do not go beyond
                these, so that they do not depend on the batches before.

        Returns:
            (window.rows, vocab) float32, overwritten by the next step.
        """
        self._newest.fill_(window.high - 1)
        shape = Window(
            min(window.rows + -window.rows % ROWS, rows or len(self._tokens)),
            window.low // COLUMNS * COLUMNS,
            min(window.high + -window.high % COLUMNS, columns or len(self._columns)),
        )
        if self._stream is not None and shape not in self._graphs:
            self._graphs[shape] = self._recorded(shape, self._stream)
        if graph := self._graphs.get(shape):
            graph.replay()
        else:
            self._take(shape)
        return self._logits[: window.rows]

    def _take(self, shape: Window) -> None:
        columns = self._columns[shape.low : shape.high]
        mask = self._mask[: shape.rows, :, :, shape.low : shape.high].masked_fill(columns > self._newest, -torch.inf)
        mask.masked_fill_(columns == self._newest, 0)  # unused rows must see a column, else they give NaN
        self._logits[: shape.rows] = self._step(
            self._tokens[: shape.rows, 0],
            self._positions[: shape.rows, 0],
            mask=mask,
            cache=self._cache,
            window=shape,
            at=self._newest - shape.low,
        )

    def _recorded(self, shape: Window, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
        """Record a step of this shape, after a first run that loads the kernels; repeating a step changes nothing.

        None if that fails.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):  # left even if ending a failed recording fails too
                self._take(shape)
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    self._take(shape)
        except RuntimeError as error:  # such as too little memory for another graph
            self.failure = self.failure or first_sentence(error)
            return None
        finally:
            before.wait_stream(stream)
        return graph


def first_sentence(error: RuntimeError) -> str:
    """The first sentence of torch's message; numbers and advice follow."""
    return str(error).partition("\n")[0].partition(". ")[0].removesuffix(".")
