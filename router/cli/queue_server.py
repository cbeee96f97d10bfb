"""The batch queue's server where the router brings its own: started, started again whenever it dies, stopped."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from router.config.model import RouterConfig
from router.queue.embedded import DataDirInUse, EmbeddedValkey, ValkeyFailed

log = logging.getLogger(__name__)

#: An embedded Valkey that died is started again after this pause, doubled each time up to the longest.
_RESTART_PAUSE_S = 0.5
_RESTART_PAUSE_MAX_S = 10.0


@contextlib.asynccontextmanager
async def queue_url(config: RouterConfig) -> AsyncIterator[str]:
    """Where the batch queue is: as configured, or an embedded server that lives as long as the block and is started
    again whenever it dies."""
    if not config.redis.is_embedded or all(model.batch is None for model in config.models.values()):
        yield config.redis.url.reveal()
        return
    server = EmbeddedValkey(config.server.data_dir)
    url = await server.start()
    keeper = asyncio.create_task(_keep_alive(server))
    try:
        yield url
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})
        await server.stop()


async def _keep_alive(server: EmbeddedValkey) -> None:
    pause_s = _RESTART_PAUSE_S
    while True:
        code = await server.wait()
        log.error("the embedded Valkey ended with code %d; starting it again", code)
        try:
            await server.start()
            pause_s = _RESTART_PAUSE_S
        except (ValkeyFailed, DataDirInUse, OSError) as error:
            log.error("the embedded Valkey did not start: %s", error)
            pause_s = min(_RESTART_PAUSE_MAX_S, pause_s * 2)
        await asyncio.sleep(pause_s)
