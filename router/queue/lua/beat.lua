-- Says that an owner lives for another lease.
-- KEYS    as in _line.lua
-- ARGV    1 owner  2 lease (microseconds)
-- Returns 1
-- Keeps   the newest beat wins, also when it shortens the lease.
-- The ZREM lets a full store take beats; without them live owners would be reaped just then.
local owner = ARGV[1]
redis.call('ZREM', OWNERS, owner)
redis.call('ZADD', OWNERS, digits(now_us() + tonumber(ARGV[2])), owner)
return 1
