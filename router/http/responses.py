"""Answers that an engine keeps (`/v1/responses/{id}`): found where they are, since each engine keeps its own.

Nobody is remembered here: the engines of the model are asked at once, which also works after a restart and from any
worker process. There are few engines, and such calls are rare beside the ones that generate.
"""

import asyncio

from router.flow.reading import Fetched, fetch
from router.http.service import ModelService, RouterState

#: Ids are short; anything longer is not one, and goes to no engine.
_ID_MAX_CHARS = 200


async def locate(service: ModelService, response_id: str) -> str | None:
    """The engine of `service` that keeps `response_id`; None where none does, or none can be asked."""
    found = await _ask(service, f"/v1/responses/{response_id}", "GET", response_id)
    return found[0] if found is not None else None


async def fetch_stored(state: RouterState, response_id: str, *, suffix: str, method: str) -> Fetched | None:
    """The answer of the engine that keeps `response_id` to a GET or a cancel, None if no engine does."""
    for service in state.models:
        found = await _ask(service, f"/v1/responses/{response_id}", "GET", response_id)
        if found is None:
            continue
        name, fetched = found
        if not suffix:
            return fetched
        return await fetch(service.flow.engines[name].upstream, method, f"/v1/responses/{response_id}{suffix}")
    return None


async def _ask(service: ModelService, path: str, method: str, response_id: str) -> tuple[str, Fetched] | None:
    if (
        not response_id
        or len(response_id) > _ID_MAX_CHARS
        or not response_id.replace("_", "").replace("-", "").isalnum()
    ):
        return None
    names = [name for name, engine in service.flow.engines.items() if engine.status.can_serve]
    answers = await asyncio.gather(*(fetch(service.flow.engines[name].upstream, method, path) for name in names))
    return next(
        (
            (name, answer)
            for name, answer in zip(names, answers, strict=True)
            if answer is not None and answer.status == 200
        ),
        None,
    )
