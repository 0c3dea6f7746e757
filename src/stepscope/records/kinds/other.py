"""What an earlier version stored and no kind of this one describes: kept as it is, shown by its names."""

from __future__ import annotations

from stepscope.records.kinds.base import BaseObserved, BaseSpec, Parameter


class OtherSpec(BaseSpec, frozen=True, kw_only=True, tag="other"):
    parameters: dict[str, Parameter] = {}

    def list_parameters(self, model: str, mode: str) -> dict[str, Parameter]:
        return dict(self.parameters)


class OtherObserved(BaseObserved, frozen=True, kw_only=True, tag="other"):
    pass
