"""Answers that an engine keeps (`/v1/responses/{id}`): found where they are, since each engine keeps its own.

Nobody is remembered here: the engines of the model are asked at once, which also works after a restart and from any
worker process. There are few engines, and such calls are rare beside the ones that generate.
"""

import asyncio
import re
from dataclasses import dataclass

from router.errors import ApiError
from router.flow.reading import Fetched, fetch
from router.http.service import ModelService, RouterState

#: What an engine's id looks like; anything else goes to no engine.
_ID = re.compile(r"[A-Za-z0-9_\-]{1,200}")


@dataclass(frozen=True, slots=True)
class Kept:
    """What `engine` said about an answer that it keeps."""

    engine: str
    said: Fetched


async def locate(service: ModelService, response_id: str) -> str | None:
    """The engine of `service` that keeps `response_id`; None where none does, or none can be asked."""
    found = await _ask(service, response_id)
    return found.engine if found is not None else None


async def read_kept(state: RouterState, response_id: str) -> Kept | None:
    """The answer `response_id` from the engine that keeps it, None if no engine does."""
    for service in state.models:
        found = await _ask(service, response_id)
        if found is not None:
            return found
    return None


async def cancel_kept(state: RouterState, response_id: str) -> Kept | None:
    """What the engine that keeps `response_id` says to cancelling it, None if no engine does.

    Raises: `ApiError` 502 where it is lost meanwhile.
    """
    for service in state.models:
        found = await _ask(service, response_id)
        if found is None:
            continue
        upstream = service.flow.engines[found.engine].upstream
        said = await fetch(upstream, "POST", f"/v1/responses/{response_id}/cancel")
        if said is None:
            raise ApiError(
                502, "engine_lost", f"Engine {found.engine} keeps the response but did not answer. Try again."
            )
        return Kept(found.engine, said)
    return None


async def _ask(service: ModelService, response_id: str) -> Kept | None:
    if not _ID.fullmatch(response_id):
        return None
    path = f"/v1/responses/{response_id}"
    names = [name for name, engine in service.flow.engines.items() if engine.status.can_serve]
    answers = await asyncio.gather(*(fetch(service.flow.engines[name].upstream, "GET", path) for name in names))
    found = zip(names, answers, strict=True)
    return next((Kept(name, said) for name, said in found if said is not None and said.status == 200), None)
