"""Answers that an engine keeps (`/v1/responses/{id}`): found where they are, since each engine keeps its own.

Nobody is remembered here: the engines of the model are asked at once, which also works after a restart and from any
worker process. There are few engines, and such calls are rare beside the ones that generate.
"""

import asyncio
import re
from dataclasses import dataclass

from router.errors import ApiError
from router.flow.reading import Fetched, fetch, status_of
from router.http.service import ModelService, RouterState

#: What an engine's id looks like; anything else goes to no engine.
_ID = re.compile(r"[A-Za-z0-9_\-]{1,200}")


@dataclass(frozen=True, slots=True)
class Kept:
    """What `engine` said about an answer that it keeps."""

    engine: str
    said: Fetched


async def locate(service: ModelService, response_id: str) -> str | None:
    """The engine of `service` that keeps `response_id`; None where none does, or none can be asked.

    Only statuses are asked for: what is kept can be large, and all engines are asked.
    """
    if not _ID.fullmatch(response_id):
        return None
    path = f"/v1/responses/{response_id}"
    names = [name for name, engine in service.flow.engines.items() if engine.status.can_serve]
    statuses = await asyncio.gather(*(status_of(service.flow.engines[name].upstream, "GET", path) for name in names))
    return next((name for name, status in zip(names, statuses, strict=True) if status == 200), None)


async def read_kept(state: RouterState, response_id: str) -> Kept | None:
    """The answer `response_id` from the engine that keeps it, None if no engine does.

    Raises: `ApiError` 502 where it cannot be had from there.
    """
    return await _ask_keeper(state, response_id, "GET", "")


async def cancel_kept(state: RouterState, response_id: str) -> Kept | None:
    """What the engine that keeps `response_id` says to cancelling it, None if no engine does.

    Raises: `ApiError` 502 where it is lost meanwhile.
    """
    return await _ask_keeper(state, response_id, "POST", "/cancel")


async def _ask_keeper(state: RouterState, response_id: str, method: str, suffix: str) -> Kept | None:
    for service in state.models:
        name = await locate(service, response_id)
        if name is None:
            continue
        said = await fetch(service.flow.engines[name].upstream, method, f"/v1/responses/{response_id}{suffix}")
        if said is None:
            raise ApiError(
                502,
                "engine_lost",
                f"Engine {name} keeps the response but did not give it in time, or it has more than 16 MiB. Try again.",
            )
        return Kept(name, said)
    return None
