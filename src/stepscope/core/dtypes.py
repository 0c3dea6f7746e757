"""Element types: one name each, their bytes, and how PyTorch, C++, NCCL, XLA and their traces spell them."""

from __future__ import annotations

from functools import lru_cache

_SPELLINGS: dict[str, tuple[int, str]] = {
    "float64": (8, "double f64 fp64"),
    "float32": (4, "float f32 fp32"),
    "float16": (2, "half __half f16 fp16"),
    "bfloat16": (2, "__nv_bfloat16 bf16"),
    "float8_e4m3fn": (1, "f8e4m3fn f8e4m3 fp8_e4m3 __nv_fp8_e4m3"),
    "float8_e4m3fnuz": (1, "f8e4m3fnuz"),
    "float8_e5m2": (1, "f8e5m2 fp8_e5m2 __nv_fp8_e5m2"),
    "float8_e5m2fnuz": (1, "f8e5m2fnuz"),
    "float8_e8m0fnu": (1, "f8e8m0fnu"),
    "float4_e2m1fn_x2": (1, ""),
    "int64": (8, "long longint longlong int64_t s64"),
    "int32": (4, "int int32_t s32"),
    "int16": (2, "short shortint int16_t s16"),
    "int8": (1, "char signedchar int8_t s8"),
    "uint64": (8, "unsignedlong longunsignedint uint64_t u64"),
    "uint32": (4, "unsignedint uint32_t u32"),
    "uint16": (2, "unsignedshort shortunsignedint uint16_t u16"),
    "uint8": (1, "byte unsignedchar uint8_t u8"),
    "bool": (1, "pred"),
    "complex32": (4, "complexhalf complex<half>"),
    "complex64": (8, "complexfloat cfloat complex<float> c64"),
    "complex128": (16, "complexdouble cdouble complex<double> c128"),
    "qint8": (1, ""),
    "quint8": (1, ""),
    "qint32": (4, ""),
}
"""By PyTorch's name: bytes of one element, and other spellings in small letters without spaces, c10:: and torch."""

DTYPE_BYTES = {name: size for name, (size, _) in _SPELLINGS.items()}
_NAMES = {text: name for name, (_, others) in _SPELLINGS.items() for text in (name, *others.split())}


@lru_cache(4096)
def dtype_name(text: str) -> str:
    """PyTorch's name of `Float`, `c10::Half`, `long int`, `s32`; an unknown spelling is returned unchanged."""
    return _NAMES.get(text.lower().replace("c10::", "").replace("torch.", "").replace(" ", ""), text)


def dtype_bytes(text: str) -> int | None:
    """Bytes of one element, by any spelling; None for an unknown type."""
    name = dtype_name(text)
    return 1 if name.lower().startswith(("float8", "f8", "__nv_fp8")) else DTYPE_BYTES.get(name)
