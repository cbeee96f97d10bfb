-- Takes an owner's head ticket out of the line, if it is small enough.
-- KEYS    as in _line.lua
-- ARGV    1 owner  2 max_tokens (KV tokens)
-- Returns {id, seq, tokens, priority}, or nil if the owner has no ticket or its head asks for more
-- Keeps   nobody passes the head: a smaller ticket behind it is never looked at.
local member = heads_of(ARGV[1], 1)[1]
if not member then
  return nil
end
local ticket = read(head_id(member, ARGV[1]))
if ticket.tokens > tonumber(ARGV[2]) then
  return nil
end
remove(ticket)
return { ticket.id, ticket.seq, ticket.tokens, ticket.priority }
