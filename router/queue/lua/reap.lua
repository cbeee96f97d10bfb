-- Removes tickets of owners whose lease ended, longest dead first.
-- KEYS    as in _line.lua
-- ARGV    1 limit (tickets, at least 1)
-- Returns how many tickets went
-- Keeps   an owner is forgotten only when its last ticket is gone, so the next call goes on where this one stopped.
-- Loops   over at most `limit` owners and `limit` tickets in all.
local limit = tonumber(ARGV[1])
local gone = 0
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', OWNERS, '-inf', digits(now_us()), 'LIMIT', 0, limit)) do
  for _, member in ipairs(heads_of(owner, limit - gone)) do
    remove(read(head_id(member, owner)))
    gone = gone + 1
  end
  if #heads_of(owner, 1) == 0 then
    redis.call('ZREM', OWNERS, owner)
  end
  if gone >= limit then
    break
  end
end
return gone
