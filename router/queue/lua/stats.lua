-- Describes the line: how many wait, for how many tokens, and how long the oldest has waited.
-- KEYS    as in _line.lua
-- ARGV    none
-- Returns {requests, tokens, age of the oldest in microseconds, 0 when nobody waits}; changes nothing
-- Loops   over the priorities in use: at most one a ticket.
local tokens, oldest = 0, nil
local sums = redis.call('HGETALL', SUMS)
for i = 1, #sums, 2 do
  tokens = tokens + tonumber(sums[i + 1])
  local first = redis.call('ZRANGEBYSCORE', ORDER, sums[i], sums[i], 'LIMIT', 0, 1)[1]
  local seq = tonumber(string.sub(first, 1, 16))
  if not oldest or seq < oldest then
    oldest = seq
  end
end
local age = 0
if oldest then
  age = math.max(0, now_us() - oldest)
end
return { redis.call('ZCARD', ORDER), tokens, age }
