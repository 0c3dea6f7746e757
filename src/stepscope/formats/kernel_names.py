"""Kernel names made comparable: profilers spell one kernel differently, and its name stands inside a C++ signature.

Kineto writes `void at::native::reduce_kernel<512, 1, …>(…)`, Nsight Systems writes `(int)512` and `<unnamed>` for the
same kernel, and very long names stay mangled. Every function here is pure and cached: a trace repeats few names.
"""

from __future__ import annotations

import re
from functools import lru_cache

_CACHE_SIZE = 1 << 16
_LONGEST = 4096
"""Characters looked at: names come from files of unknown origin, and no real one says anything new behind this many."""

_ANONYMOUS = "(anonymous namespace)"
_UNNAMED = re.compile(r"<unnamed>(?=::)|\{anonymous\}|`anonymous namespace'|\(anonymous\)(?=::)")
_BOOL_CAST = re.compile(r"\(bool\)([01])\b")
_NUMBER_CAST = re.compile(r"\((?:[A-Za-z_][\w:]*(?: [a-z]+)*)\)(-?\d)")
_NUMBER_SUFFIX = re.compile(r"\b(\d+)(?:u|l|ul|ull|ll)\b", re.IGNORECASE)
_CONST_BEFORE = re.compile(r"\bconst ([\w:]+)(?=[ *&,>)])")
_NSYS_LAMBDA = re.compile(r"\[lambda(\([^()\[\]]*\)) \(instance (\d+)\)\]")
_ENABLE_IF = re.compile(r"^(?:\w+ )*(?:\w+::)*enable_if(?:_t)?<.*?>(?:::type)? (?=[\w(:])")
"""A return type that Nsight Systems writes with unequal brackets (`enable_if<T2>(int)0&&…>::type f<…>`)."""
_SPACES = re.compile(r" *([<>,*&]) *")
_MANGLED_LENGTH = re.compile(r"[1-9]\d{0,3}")
_MANGLED_NOISE = re.compile(r"S[0-9A-Z]*_|T\d*_|L[a-z]n?\d+E|En?\d+E")
"""Substitutions, template parameters, literals: digits in them are no lengths."""

_NOT_CODE = re.compile(r"\[?(?:CUDA )?mem(?:cpy|set)\b", re.IGNORECASE)
"""`Memcpy HtoD (Pageable -> Device)`, `[CUDA memset]`: words of a profiler, no signature."""

_OPEN = "<({["
_CLOSE = ">)}]"
_HIDDEN_NAMESPACES = re.compile(r"^(?:at::native::|at::|c10::|std::)+|\(anonymous namespace\)::")

_WRAPPERS = re.compile(
    r"(?:^|::)(?:Kernel2?|device_kernel|\w*elementwise\w*_kernel\w*|reduce_kernel|multi_tensor_apply_kernel"
    r"|DeviceReduce\w*|DeviceScan\w*|DeviceSelect\w*|kernel_agent|static_kernel|elementwise_kernel_with_index"
    r"|distribution_elementwise_grid_stride_kernel)$"
)
_CUTLASS = re.compile(r"\bcutlass_(?:\d|tensorop|simt)\w*")
_CUTLASS_PARTS = ("ImplicitGemmConvolution", "ReduceSplitK", "GemmUniversal", "FlashAttn", "FmhaKernel")
_FUNCTOR = re.compile(
    r"(?<!\w)(?!gpu_kernel|operator|ReduceOp\b|OffsetCalculator)"
    r"(?:\w{1,80}?[Ff]unctor\w*|\w{2,80}?Ops?\b|\w{3,80}(?=\([^()]*\)(?: const)?::\{lambda))"
)


def _clip(name: str) -> str:
    return name[:_LONGEST].strip()


@lru_cache(_CACHE_SIZE)
def normal_name(name: str) -> str:
    """Qualified name with template arguments, in one spelling; without return type and parameter list.

    Parameters are dropped because Nsight Systems writes them as `T1 *`, Kineto as the types themselves.
    """
    text = _clip(name)
    if _NOT_CODE.match(text):
        return text
    if text.startswith("_Z"):
        text = _readable(text)
    text = _NSYS_LAMBDA.sub(r"{lambda\1#\2}", _UNNAMED.sub(_ANONYMOUS, text)).replace("operator ()", "operator()")
    text = _ENABLE_IF.sub("", text.removesuffix(" [clone .kd]").removesuffix(".kd"), count=1)
    text = _without_return_type(_without_parameters(text))
    if "<" in text:
        text = _BOOL_CAST.sub(lambda found: "true" if found[1] == "1" else "false", text)
        text = _NUMBER_CAST.sub(r"\1", text)
        text = _NUMBER_SUFFIX.sub(r"\1", text)
        text = _CONST_BEFORE.sub(r"\1 const", text)
        text = _SPACES.sub(r"\1", text).replace(",", ", ")
    return text.strip()


@lru_cache(_CACHE_SIZE)
def base_name(name: str) -> str:
    """Namespaces and identifier alone: `at::native::reduce_kernel`."""
    whole = normal_name(name)
    return whole if _NOT_CODE.match(whole) else _outside_brackets(whole)


@lru_cache(_CACHE_SIZE)
def short_name(name: str) -> str:
    """For a table: the identifier, and for kernels that only wrap something the thing they wrap."""
    base = base_name(name)
    shown = _HIDDEN_NAMESPACES.sub("", base) or base
    if not is_wrapper(name):
        return shown
    arguments = normal_name(name)[len(base) :]
    if found := _CUTLASS.search(arguments):
        return found[0]
    if "cutlass" in base:
        part = next((part for part in _CUTLASS_PARTS if part in arguments), None)
        return f"{shown}<{part}>" if part else shown
    functors = _FUNCTOR.findall(arguments)
    return f"{shown}<{functors[-1]}>" if functors else shown


@lru_cache(_CACHE_SIZE)
def is_wrapper(name: str) -> bool:
    """Whether the identifier says nothing of the work and the template arguments must be asked."""
    return bool(_WRAPPERS.search(base_name(name)))


def _without_parameters(text: str) -> str:
    """Cuts the parameter list: the first top-level parenthesis after which nothing is qualified further."""
    depth = 0
    start = -1
    for place, letter in enumerate(text):
        if letter in _OPEN:
            if letter == "(" and depth == 0 and not text.startswith(_ANONYMOUS, place):
                start = place
                break
            depth += 1
        elif letter in _CLOSE and not (letter == ">" and place and text[place - 1] == "-"):
            depth = max(0, depth - 1)
    return text[:start].strip() if start > 0 else text


def _without_return_type(text: str) -> str:
    """Cuts what stands before the last top-level space: `void`, `std::enable_if<…>::type`, `static`."""
    depth = 0
    cut = 0
    place = 0
    while place < len(text):
        if depth == 0 and text.startswith(_ANONYMOUS, place):
            place += len(_ANONYMOUS)
            continue
        letter = text[place]
        if letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth = max(0, depth - 1)
        elif letter == " " and depth == 0:
            cut = place + 1
        place += 1
    return text[cut:] or text


def _outside_brackets(text: str) -> str:
    parts: list[str] = []
    depth = 0
    place = 0
    while place < len(text):
        if depth == 0 and text.startswith(_ANONYMOUS, place):
            parts.append(_ANONYMOUS)
            place += len(_ANONYMOUS)
            continue
        letter = text[place]
        if letter in "<({":
            depth += 1
        elif letter in ">)}":
            depth = max(0, depth - 1)
        elif depth == 0:
            parts.append(letter)
        place += 1
    return "".join(parts).strip() or text


def _readable(mangled: str) -> str:
    """The identifiers of a mangled name as `a::b<c, d, …>`.

    Not a demangler: substitutions and literals are left out. Enough to say what a kernel is, because its identifiers
    stand in the name in clear text with their lengths before them.
    """
    qualified: list[str] = []
    arguments: list[str] = []
    nested = mangled.startswith("_ZN")
    words = qualified
    place = 2
    while place < len(mangled):
        if found := _MANGLED_NOISE.match(mangled, place):
            place = found.end()
        elif found := _MANGLED_LENGTH.match(mangled, place):
            place = found.end() + int(found[0])
            word = mangled[found.end() : place]
            words.append(_ANONYMOUS if word.startswith("_GLOBAL__N") else word)
            words = words if nested else arguments
        else:
            if qualified and mangled[place] in "IE":
                words = arguments
            place += 1
    name = "::".join(qualified) or mangled
    return f"{name}<{', '.join(arguments)}>" if arguments else name
