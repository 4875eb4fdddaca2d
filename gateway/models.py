"""The served models, by request name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.errors import BatonError, FieldViolation, InvalidRequest, ModelNotFound, NoWorkers
from gateway.intake.violations import shown
from gateway.serving import Serving
from gateway.telemetry.recorder import GatewayRecorder

_MAX_NAME_CHARS = 40


class Models:
    """Served models in command-line order; their names are disjoint. Belongs to one event loop."""

    def __init__(self, servings: Sequence[Serving], recorder: GatewayRecorder) -> None:
        self._servings = tuple(servings)
        self._recorder = recorder
        self._by_name = {name: serving for serving in servings for name in serving.facts.names}
        """By model name and alias. Adapters are absent, since workers report them."""

    def __iter__(self) -> Iterator[Serving]:
        return iter(self._servings)

    def of(self, name: str) -> Serving:
        """Return the model with that name or adapter; for an empty name, the only model.

        Raises ModelNotFound, naming the served models; InvalidRequest for an empty name with
        several models; NoWorkers if the name may be an adapter of workers not reached yet.
        """
        serving = self._by_name.get(name)
        if serving is None and len(self._servings) == 1 and not name:
            serving = self._servings[0]
        if serving is None:
            serving = next((s for s in self._servings if name in s.facts.adapters), None)
        if serving is None:
            error = self._refusal(name)
            self._recorder.refuse(error.reason)
            raise error
        return serving

    def _refusal(self, name: str) -> BatonError:
        listed = ", ".join(repr(serving.facts.name) for serving in self._servings)
        adapters = [repr(adapter) for s in self._servings for adapter in s.facts.adapters]
        also = f", with adapters {', '.join(adapters)}" if adapters else ""
        if not name:
            return InvalidRequest.of(
                FieldViolation("model", f'"": several are served; name one of {listed}{also}')
            )
        unreached = [repr(s.facts.name) for s in self._servings if not s.is_reached]
        if unreached:
            return NoWorkers(
                f"model {shown(name)} is none of {listed}{also}; whether it is an adapter is not "
                f"known before a decode worker of {', '.join(unreached)} was reached",
                tier="decode",
            )
        is_one = len(self._servings) == 1
        here = f"the model is {listed}, and an empty name means the same" if is_one else listed
        return ModelNotFound(
            f"model {shown(name)} is not served here; {here if is_one else f'there are {here}'}"
            f"{also}",
            model=name[:_MAX_NAME_CHARS],
        )
