"""The one answer to “what kind of kernel is this?”: versioned, by the rules in `classifier.toml`.

A row's kind decides first (copies and fills), then the collective it was recorded with, then its name. A user's own
rules come before the packaged ones: a TOML file of the same form, given as an argument or in STEPSCOPE_CLASSIFIER.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.core.errors import BadInputError, first_line, unknown_name
from stepscope.formats import timeline
from stepscope.formats.kernel_names import base_name, normal_name

CATEGORIES = (
    "communication",
    "copy",
    "set",
    "moe",
    "attention",
    "convolution",
    "gemm",
    "embedding",
    "norm",
    "softmax",
    "optimizer",
    "sort",
    "reduction",
    "elementwise",
    "other",
)
COMMUNICATION, COPY, SET, MOE, ATTENTION, CONVOLUTION, GEMM, EMBEDDING = range(8)
NORM, SOFTMAX, OPTIMIZER, SORT, REDUCTION, ELEMENTWISE, OTHER = range(8, 15)

CLASSIFIER_VERSION = 2
"""Raised whenever a rule changes what a kernel is: results of different versions are not comparable class by class."""

CLASSIFIER_VARIABLE = "STEPSCOPE_CLASSIFIER"
_RULE_KEYS = frozenset({"category", "pattern", "whole", "also", "reason"})
_CACHE_SIZE = 1 << 16
_NUMBERED = re.compile(r"%?[a-z][a-z0-9_-]*(?:\.\d+)+")


class Rule(NamedTuple):
    """One line of the table; exactly one of the two patterns is there."""

    category: int
    pattern: re.Pattern[str] | None
    """Searched in the identifier with its namespaces."""
    whole: re.Pattern[str] | None
    """Searched in the name with its template arguments."""
    also: tuple[str, ...]
    reason: str


class Classifier:
    """Rules in order; the first that fits decides. Use `find_classifier` to get one."""

    def __init__(self, rules: Sequence[Rule], identity: str) -> None:
        self.rules = tuple(rules)
        self.identity = identity
        """Names the rules: goes with every result, and into the key of every cache of results."""
        self._rule_of = lru_cache(_CACHE_SIZE)(self._find_rule)

    def classify(self, name: str, *, kind: int, collective: str | None = None) -> int:
        """Index into CATEGORIES; −1 (MISSING) for rows that keep no device busy, annotations of kernels among them."""
        if kind not in timeline.DEVICE_KINDS:
            return timeline.MISSING
        if kind != timeline.KERNEL:
            return COPY if kind == timeline.COPY else SET
        if collective:
            return COMMUNICATION
        return self._classify_kernel(name)

    def classify_names(self, names: Sequence[str]) -> list[int]:
        """The same for kernels by name alone, one answer a name."""
        return [self._classify_kernel(name) for name in names]

    def labels(self, name: str) -> tuple[str, ...]:
        """The kernel's class and what else it is: a fused kernel carries two, some a finer word (`kv_cache_write`)."""
        rule = self._rule_of(name)
        return ("other",) if rule is None else (CATEGORIES[rule.category], *rule.also)

    def explain(self, name: str) -> str:
        """Why the kernel is what it is."""
        rule = self._rule_of(name)
        return "no rule fits" if rule is None else rule.reason

    def _classify_kernel(self, name: str) -> int:
        # A compiler numbers its operations (fusion.1 … fusion.40000): one look at the word is enough.
        rule = self._rule_of(name[: name.index(".")] if _NUMBERED.fullmatch(name) else name)
        return OTHER if rule is None else rule.category

    def _find_rule(self, name: str) -> Rule | None:
        base, whole = base_name(name), normal_name(name)
        for rule in self.rules:
            if (rule.pattern and rule.pattern.search(base)) or (rule.whole and rule.whole.search(whole)):
                return rule
        return None


def classify(name: str, *, kind: int, collective: str | None = None) -> int:
    """What a row of a timeline is: index into CATEGORIES, −1 for rows that keep no device busy."""
    return find_classifier().classify(name, kind=kind, collective=collective)


def classify_names(names: Sequence[str]) -> list[int]:
    """What kernels with these names are; call it once per distinct name."""
    return find_classifier().classify_names(names)


def labels(name: str) -> tuple[str, ...]:
    """Class of a kernel by name, then its further labels."""
    return find_classifier().labels(name)


def find_classifier(path: Path | None = None) -> Classifier:
    """The packaged rules, after those of `path` or of the file in STEPSCOPE_CLASSIFIER; read once a process."""
    chosen = path or (Path(os.environ[CLASSIFIER_VARIABLE]) if os.environ.get(CLASSIFIER_VARIABLE) else None)
    if chosen is None:
        return _packaged_classifier()
    try:
        text = chosen.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"cannot read the classifier rules: {first_line(error)}",
            hint=f"unset {CLASSIFIER_VARIABLE} to use the packaged rules alone",
            where=str(chosen),
        ) from error
    return _extended_classifier(text, str(chosen))


@cache
def _packaged_classifier() -> Classifier:
    text = resources.files(__package__).joinpath("classifier.toml").read_text(encoding="utf-8")
    return Classifier(parse_rules(text, where="classifier.toml"), str(CLASSIFIER_VERSION))


@lru_cache(8)
def _extended_classifier(text: str, where: str) -> Classifier:
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Classifier([*parse_rules(text, where=where), *_packaged_classifier().rules], f"{CLASSIFIER_VERSION}+{own}")


def parse_rules(text: str, *, where: str) -> list[Rule]:
    """Rules of a TOML text; anything that is not a rule is refused with its number."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"not TOML: {first_line(error)}", where=where) from error
    entries = content.get("rule")
    if not isinstance(entries, list) or set(content) != {"rule"}:
        hint = "write [[rule]] tables with category, pattern and reason"
        raise BadInputError("a classifier file holds [[rule]] tables and nothing else", hint=hint, where=where)
    return [_parse_rule(entry, f"{where}: rule {number}") for number, entry in enumerate(entries, start=1)]


def _parse_rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict):
        raise BadInputError("a rule is a table", where=where)
    for key in entry:
        if key not in _RULE_KEYS:
            raise unknown_name("key of a rule", key, sorted(_RULE_KEYS), where=where)
    category = entry.get("category")
    if category not in CATEGORIES:
        raise unknown_name("category", str(category), CATEGORIES, where=where)
    if ("pattern" in entry) == ("whole" in entry):
        raise BadInputError("a rule has either `pattern` or `whole`", where=where)
    also = entry.get("also", [])
    if not isinstance(also, list) or not all(isinstance(label, str) for label in also):
        raise BadInputError("`also` is a list of words", where=where)
    return Rule(
        category=CATEGORIES.index(category),
        pattern=_compile(entry.get("pattern"), where),
        whole=_compile(entry.get("whole"), where),
        also=tuple(also),
        reason=str(entry.get("reason", "")),
    )


def _compile(pattern: object, where: str) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(str(pattern), re.IGNORECASE)
    except re.error as error:
        raise BadInputError(f"{pattern!r} is not a regular expression: {error}", where=where) from error


_DEVICE_WAIT = re.compile(r"(?:event|semaphore|fence)_(?:wait|record|signal)|(?:wait|record)_event", re.IGNORECASE)


def is_device_wait(name: str) -> bool:
    """Whether a row that a device recorded among its work is a wait, or marks a place in a queue: no work.

    MTIA writes such rows (`event_wait`) beside its kernels.
    """
    return _DEVICE_WAIT.fullmatch(name) is not None


_HOST_WORK = re.compile(r"^(?:gloo|mpi|ucc):(\w+)$")
_DEVICE_WORK = re.compile(r"^(?:nccl|rccl|xccl):(\w+)(?: .*)?$")
_HOST_CALL = re.compile(r"^c10d::_?(\w+?)_?$")
_HOST_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "recv_any_source": "recv",
}


def classify_host_communication(name: str) -> str | None:
    """The collective that a host row stands for: the work (`gloo:all_reduce`) or the call (`c10d::allreduce_`).

    None for anything else, `nccl:all_reduce` among it: that annotation repeats a kernel. Work on the CPU runs on
    another thread than the call, and the device view of such a trace shows no communication at all.
    """
    found = _HOST_WORK.match(name) or _HOST_CALL.match(name)
    if found is None:
        return None
    word = found[1]
    return _HOST_NAMES.get(word, word)


def is_host_work(name: str) -> bool:
    """Whether a row is the work of a collective on the host (`gloo:all_reduce`), however the profiler files it."""
    return _HOST_WORK.match(name) is not None


def classify_lone_communication(name: str) -> str | None:
    """The same for a trace without a device, such as a flight-recorder dump: there no kernel says it again."""
    found = _DEVICE_WORK.match(name)
    return found[1] if found else classify_host_communication(name)
