"""numpy arrays as raw little-endian bytes beside their shape."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quartet.api.common.v1 import tensor_pb2
from quartet.codec.check import invalid

Scalar = TypeVar("Scalar", bound=np.generic)

_WIRE = {
    tensor_pb2.DATA_TYPE_BOOL: np.dtype("|b1"),
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("|u1"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    # numpy has no bfloat16: its bits are read as integers and widened to float32.
    tensor_pb2.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT64: np.dtype("<f8"),
}
_NUMBERS = {
    dtype: number for number, dtype in _WIRE.items() if number != tensor_pb2.DATA_TYPE_BFLOAT16
}
_TORCH_NAMES = {
    "bool": tensor_pb2.DATA_TYPE_BOOL,
    "uint8": tensor_pb2.DATA_TYPE_UINT8,
    "int32": tensor_pb2.DATA_TYPE_INT32,
    "int64": tensor_pb2.DATA_TYPE_INT64,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "float64": tensor_pb2.DATA_TYPE_FLOAT64,
}
_TORCH_NUMBERS = {int(number): name for name, number in _TORCH_NAMES.items()}


def encode_tensor(array: NDArray[Any]) -> tensor_pb2.Tensor:
    """Encode an array of any shape. Raises TypeError for a dtype that the contract lacks."""
    # ascontiguousarray would turn a scalar into one element of one dimension.
    dense = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    number = _NUMBERS.get(dense.dtype)
    if number is None:
        raise TypeError(f"a tensor of dtype {array.dtype} cannot be sent")
    return tensor_pb2.Tensor(data_type=number, shape=dense.shape, data=dense.tobytes())


def decode_tensor(message: tensor_pb2.Tensor, field: str = "tensor") -> NDArray[Any]:
    """Decode into a read-only view of the message's bytes (bfloat16: into a new float32 array).

    Raises:
        RequestError: the data type is unknown, or the bytes do not fit shape and type.
    """
    dtype = _WIRE.get(message.data_type)
    if dtype is None:
        raise invalid(f"{field}.data_type", message.data_type, "is not set or not known")
    shape = tuple(message.shape)
    if any(size < 0 for size in shape):
        raise invalid(f"{field}.shape", shape, f"has a negative size: {shape}")
    data = message.data
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise invalid(
            f"{field}.data",
            f"{len(data)} bytes",
            f"has {len(data)} bytes, but shape {list(shape)} of {dtype} needs {wanted}",
        )
    raw = np.frombuffer(data, dtype=dtype)
    if message.data_type == tensor_pb2.DATA_TYPE_BOOL and np.any(raw.view(np.uint8) > 1):
        raise invalid(f"{field}.data", "a byte above 1", "has a bool that is neither 0 nor 1")
    if message.data_type == tensor_pb2.DATA_TYPE_BFLOAT16:
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    try:
        return raw.reshape(shape)
    except ValueError as error:  # more dimensions than numpy has, or sizes beside a 0 out of range
        raise invalid(f"{field}.shape", shape, f"is no array's shape: {error}") from error


def decode_vector(
    message: tensor_pb2.Tensor, scalar: type[Scalar], length: int | None, field: str
) -> NDArray[Scalar]:
    """Decode one dimension of one type.

    Args:
        message: the tensor.
        scalar: the element type that it must have.
        length: the number of elements that it must have, or None for any.
        field: its name in errors.
    """
    array = decode_tensor(message, field)
    if array.dtype != np.dtype(scalar):
        raise invalid(
            f"{field}.data_type", array.dtype, f"is {array.dtype}, not {np.dtype(scalar)}"
        )
    if array.ndim != 1:
        raise invalid(f"{field}.shape", array.shape, f"has {array.ndim} dimensions, not 1")
    if length is not None and len(array) != length:
        raise invalid(f"{field}.shape", len(array), f"has {len(array)} elements, not {length}")
    return array


def encode_vector(array: NDArray[Any], scalar: type[np.generic]) -> tensor_pb2.Tensor:
    """Encode one dimension, converted to `scalar`."""
    dense = np.asarray(array, dtype=scalar)
    if dense.ndim != 1:
        raise ValueError(f"an array of shape {dense.shape} where one dimension is sent")
    return encode_tensor(dense)


def encode_dtype(name: str, field: str = "dtype") -> Any:
    """Data type by torch's name without the prefix, for example "bfloat16"."""
    number = _TORCH_NAMES.get(name)
    if number is None:
        raise invalid(field, name, f"is {name!r}", f"one of {', '.join(_TORCH_NAMES)}")
    return number


def decode_dtype(number: int, field: str = "dtype") -> str:
    """Torch's name, without the prefix, of a data type."""
    name = _TORCH_NUMBERS.get(number)
    if name is None:
        raise invalid(field, number, "is not set or not known")
    return name
