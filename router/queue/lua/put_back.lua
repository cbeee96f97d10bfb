-- Returns a ticket to the place it had, whatever the bounds say.
-- KEYS    as in _line.lua
-- ARGV    1 id  2 owner  3 tokens (KV tokens)  4 priority  5 seq (microseconds)
--         6 grace (microseconds): the lease of an owner that has none yet
-- Returns 1 if it was put back, 0 if it stands in the line already
-- Keeps   later arrivals get a later seq, even in a store that lost its own counter.
local ticket = {
  id = ARGV[1],
  owner = ARGV[2],
  tokens = tonumber(ARGV[3]),
  priority = tonumber(ARGV[4]),
  seq = tonumber(ARGV[5]),
}
if read(ticket.id) then
  return 0
end
-- Removes nothing; see _line.lua on a full store. The claim before gave at least this memory back.
redis.call('ZREM', ORDER, place(ticket.id, ticket.seq))
insert(ticket)
if ticket.seq > tonumber(redis.call('GET', SEQ) or '0') then
  redis.call('SET', SEQ, digits(ticket.seq))
end
redis.call('ZADD', OWNERS, 'NX', digits(now_us() + tonumber(ARGV[6])), ticket.owner)
return 1
