"""What Triton's interpreter lacks to run the kernels of liger-kernel on a CPU: ``mend_interpreter(monkeypatch)``."""

import functools
from typing import Any

import numpy as np
import pytest
import torch


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, let the interpreter compute as compiled kernels do.

    Numbers arrive as float32 tensors; those in bfloat16, which it keeps as 16 bits, are not multiplied as integers, and are rounded
    to the nearest instead of cut; CUDA's `rsqrt` is Triton's.
    """
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    language, handle = interpreter.tl, interpreter.TensorHandle
    convert, builder_type = interpreter._implicit_cvt, interpreter.InterpreterBuilder
    combine, change = builder_type.binary_op, builder_type.cast_impl

    kinds = interpreter._get_np_dtype
    known = functools.cache(kinds)  # it makes a table of all kinds each time

    def in_numpy(kind: Any) -> Any:
        return known(kind.scalar) if type(kind.scalar) is language.dtype else kinds(kind)

    def implicit(argument: Any) -> Any:
        if type(argument) is not float:
            return convert(argument)
        return language.tensor(handle(np.array([argument], dtype=np.float32), language.float32), language.float32)

    def binary(builder: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != language.bfloat16:
            return combine(builder, left, right, operation)
        wide = (builder.cast_impl(operand, language.float32) for operand in (left, right))
        return builder.cast_impl(combine(builder, *wide, operation), language.bfloat16)

    def cast(builder: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (language.float32, language.bfloat16):
            return change(builder, source, kind)
        rounded = torch.from_numpy(np.array(source.data, dtype=np.float32)).bfloat16()
        return handle(rounded.view(torch.int16).numpy().view(np.uint16), kind.scalar)

    monkeypatch.setattr(interpreter, "_get_np_dtype", in_numpy)
    monkeypatch.setattr(interpreter, "_implicit_cvt", implicit)
    monkeypatch.setattr(builder_type, "binary_op", binary)
    monkeypatch.setattr(builder_type, "cast_impl", cast)
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: language.rsqrt(x))
