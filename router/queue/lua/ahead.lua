-- Counts the tickets that stand before one.
-- KEYS    as in _line.lua
-- ARGV    1 id
-- Returns the count, or nil if the id is not in the line; changes nothing
local ticket = read(ARGV[1])
if not ticket then
  return nil
end
return redis.call('ZRANK', ORDER, place(ticket.id, ticket.seq))
