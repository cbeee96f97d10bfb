-- Adds a ticket at the end of its priority, if both bounds allow.
-- KEYS    as in _line.lua
-- ARGV    1 id  2 owner  3 tokens (KV tokens)  4 priority  5 max_requests  6 max_tokens (KV tokens)
--         7 grace (microseconds): the lease of an owner that has none yet
-- Returns {'ok', seq, tokens, priority, owner, ahead_requests, ahead_tokens} of the ticket that stands in the line,
--         or {'full_requests'} or {'full_tokens'} with nothing changed
-- Keeps   an id that is already in the line keeps its first place and its first values.
-- Loops   over the priorities in use, and for a repeated id over those ahead of it: at most max_requests each.
local id = ARGV[1]
local known = read(id)
if known then
  local rank = redis.call('ZRANK', ORDER, place(id, known.seq))
  local tokens = 0
  if rank > 0 then
    for _, member in ipairs(redis.call('ZRANGE', ORDER, 0, rank - 1)) do
      tokens = tokens + read(string.sub(member, 18)).tokens
    end
  end
  return { 'ok', known.seq, known.tokens, known.priority, known.owner, rank, tokens }
end

local ticket = { id = id, owner = ARGV[2], tokens = tonumber(ARGV[3]), priority = tonumber(ARGV[4]) }
if redis.call('ZCARD', ORDER) + 1 > tonumber(ARGV[5]) then
  return { 'full_requests' }
end
local total, ahead_tokens = 0, 0
local sums = redis.call('HGETALL', SUMS)
for i = 1, #sums, 2 do
  local tokens = tonumber(sums[i + 1])
  total = total + tokens
  if tonumber(sums[i]) <= ticket.priority then
    ahead_tokens = ahead_tokens + tokens
  end
end
if total + ticket.tokens > tonumber(ARGV[6]) then
  return { 'full_tokens' }
end

local now = now_us()
ticket.seq = math.max(now, tonumber(redis.call('GET', SEQ) or '0') + 1)
local ahead_requests = redis.call('ZCOUNT', ORDER, '-inf', digits(ticket.priority))
insert(ticket)
redis.call('SET', SEQ, digits(ticket.seq))
redis.call('ZADD', OWNERS, 'NX', digits(now + tonumber(ARGV[7])), ticket.owner)
return { 'ok', ticket.seq, ticket.tokens, ticket.priority, ticket.owner, ahead_requests, ahead_tokens }
