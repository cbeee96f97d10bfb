"""Makes the queue's store from the configuration."""

from router.config import redis_url
from router.config.model import RedisConfig
from router.queue.redis import RedisQueue


def open_queue(config: RedisConfig, *, url: str) -> RedisQueue:
    """The store at `url`: that of `config`, or of the embedded server where `config.is_embedded`.

    Nothing is connected yet: `await queue.start()` proves that the store is fit, `await queue.close()` gives all back.

    Raises:
        ValueError: `url` is none that `router.config.redis_url` knows.
    """
    return RedisQueue(redis_url.parse(url), key_prefix=config.key_prefix, timeout_s=config.socket_timeout_s)
