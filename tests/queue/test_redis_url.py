"""Every URL form the documentation names is read, and every mistake is answered by what to write instead."""

import pytest

from router.config.redis_url import RedisKind, RedisTls, RedisUrl, parse


def _plain(url: str) -> RedisUrl:
    parsed = parse(url)
    assert parsed.password is None
    return parsed


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", RedisUrl(RedisKind.DIRECT, (("h", 6379),))),
        ("  REDIS://h:1/ ", RedisUrl(RedisKind.DIRECT, (("h", 1),))),
        ("redis://h:7000/15", RedisUrl(RedisKind.DIRECT, (("h", 7000),), db=15)),
        ("redis://[::1]:7000", RedisUrl(RedisKind.DIRECT, (("::1", 7000),))),
        ("rediss://h", RedisUrl(RedisKind.DIRECT, (("h", 6379),), tls=RedisTls())),
        (
            "rediss://h?tls_ca_file=/etc/ca%20file&tls_verify=false&tls_cert_file=c&tls_key_file=k",
            RedisUrl(RedisKind.DIRECT, (("h", 6379),), tls=RedisTls(False, "/etc/ca file", "c", "k")),
        ),
        ("unix:///run/v@1/my%20sock?db=2", RedisUrl(RedisKind.UNIX, path="/run/v@1/my sock", db=2)),
        (
            "redis+sentinel://a,b:1,[fe80::1]/the%20primary/3",
            RedisUrl(RedisKind.SENTINEL, (("a", 26379), ("b", 1), ("fe80::1", 26379)), master_name="the primary", db=3),
        ),
        ("rediss+sentinel://a/p", RedisUrl(RedisKind.SENTINEL, (("a", 26379),), master_name="p", tls=RedisTls())),
        ("redis+cluster://a,b:1", RedisUrl(RedisKind.CLUSTER, (("a", 6379), ("b", 1)))),
        ("rediss+cluster://a/0", RedisUrl(RedisKind.CLUSTER, (("a", 6379),), tls=RedisTls())),
    ],
)
def test_a_url_says_where_the_store_is(url: str, expected: RedisUrl) -> None:
    assert _plain(url) == expected


@pytest.mark.parametrize(
    ("url", "user", "password"),
    [
        ("redis://:p%40%2F%3A%23w@h", None, "p@/:#w"),
        ("redis://us%20er:a:b@h", "us er", "a:b"),
        ("redis+cluster://u:p@h,i", "u", "p"),
        ("redis+sentinel://u:p@h,i/m", "u", "p"),
        ("unix://u:p@/run/s", "u", "p"),
        ("redis://u:p@ss@h", "u", "p@ss"),
    ],
)
def test_credentials_are_decoded_and_never_shown(url: str, user: str | None, password: str) -> None:
    parsed = parse(url)

    assert parsed.username == user
    assert parsed.password is not None
    assert parsed.password.reveal() == password
    assert "Secret(***)" in repr(parsed)


def test_sentinels_have_credentials_of_their_own() -> None:
    parsed = parse("redis+sentinel://h/m?sentinel_username=su&sentinel_password=s%40p")

    assert parsed.password is None
    assert parsed.sentinel_username == "su"
    assert parsed.sentinel_password is not None
    assert parsed.sentinel_password.reveal() == "s@p"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must begin with one of redis, rediss, unix"),
        ("embedded", "must begin with one of"),
        ("localhost:6379", "must begin with one of"),
        ("http://h", "must begin with one of"),
        ("redis://", "host number 1"),
        ("redis://h:0", "port of 1 to 65535"),
        ("redis://h:65536", "port of 1 to 65535"),
        ("redis://h:port", "port of 1 to 65535"),
        ("redis://::1", "IPv6 address in brackets"),
        ("redis://u:pa/ss@h", "percent-encode"),
        ("redis://a,b", "takes one host"),
        ("redis://u@h", "user without a password"),
        ("redis://u:@h", "user without a password"),
        ("redis://h/x", "number of 0 to 65535"),
        ("redis://h/65536", "number of 0 to 65535"),
        ("redis://h/0/1", "database number only"),
        ("redis://:pa#ss@h", "write it as %23"),
        ("redis://h\n", None),
        ("redis://a\nb", "control character"),
        ("redis://h?db=1", "allowed after '\\?': none"),
        ("rediss://h?ssl_cert_reqs=none", "tls_ca_file, tls_cert_file, tls_key_file, tls_verify"),
        ("rediss://h?tls_verify=no", "true or false"),
        ("rediss://h?tls_verify=true&tls_verify=true", "given once"),
        ("rediss://h?tls_ca_file=", "with a value"),
        ("rediss://h?tls_key_file=k", "needs tls_cert_file"),
        ("redis://h?tls_verify=false", "unknown here"),
        ("unix://run/s", "absolute socket path"),
        ("unix://", "absolute socket path"),
        ("redis+sentinel://h", "needs the master's name"),
        ("redis+sentinel://h/", "needs the master's name"),
        ("redis+sentinel://h/m/0/1", "needs the master's name"),
        ("redis+sentinel://h/m?sentinel_username=u", "needs sentinel_password"),
        ("redis+sentinel://h,/m", "host number 2"),
        ("redis+cluster://h/1", "database 0 only"),
        ("redis+cluster://h,h:6379", "one host twice"),
    ],
)
def test_a_mistake_is_answered_by_the_fix(url: str, said: str | None) -> None:
    if said is None:
        assert parse(url).hosts == (("h", 6379),)
        return
    with pytest.raises(ValueError, match=said):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@h:port",
        "redis://user:s3cret@a,b",
        "redis://user:s3/cret@h",
        "redis://s3cret@h",
        "redis://user:s3#cret@h",
        "redis://user:s3?cret@h",
        "s3cret",
        "redis+sentinel://h/m?sentinel_passwort=s3cret",
        "redis+cluster://:s3cret@h/1",
        "unix://:s3cret@h/path",
    ],
)
def test_no_error_repeats_what_may_be_a_password(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(url)

    assert "s3" not in str(caught.value)
    assert "cret" not in str(caught.value)
