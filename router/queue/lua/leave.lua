-- Removes a waiting ticket, for its owner only.
-- KEYS    as in _line.lua
-- ARGV    1 id  2 owner
-- Returns 1 if it was removed, 0 if it was not in the line or is another owner's
local ticket = read(ARGV[1])
if not ticket or ticket.owner ~= ARGV[2] then
  return 0
end
remove(ticket)
return 1
