-- What all operations on the line of one model share. The loader puts this text before each of them.
-- KEYS    1 order    zset: "<seq, 16 digits>:<id>" scored by priority; ties go by seq, which is the time of arrival
--         2 heads    zset, all scores 0: "<owner> <priority + 2^31, 10 digits><seq, 16 digits>:<id>"; read by owner
--         3 tickets  hash: id -> "<seq> <tokens> <priority> <owner>"
--         4 sums     hash: priority -> tokens waiting at it; a field at 0 is removed
--         5 owners   zset: owner -> end of its lease, microseconds of TIME
--         6 seq      string: the last place given
-- Units   seq: microseconds of TIME, raised so that it grows; tokens: KV tokens; owner: percent-encoded, no space
-- Keeps   order, heads and tickets hold the same ids, and sums their tokens, before and after every operation.
--         Operations that free or keep memory begin with a ZREM, which a full store (noeviction) does not refuse.
local ORDER, HEADS, TICKETS, SUMS, OWNERS, SEQ = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]

local function digits(number)
  return string.format('%.0f', number)
end

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function place(id, seq)
  return string.format('%016.0f', seq) .. ':' .. id
end

local function head(id, owner, priority, seq)
  return owner .. ' ' .. string.format('%010.0f', priority + 2147483648) .. place(id, seq)
end

-- The id inside a member of `heads`: after the owner, one space, 26 digits and a colon.
local function head_id(member, owner)
  return string.sub(member, #owner + 29)
end

-- The first `count` members of `heads` that are `owner`'s; '!' is the character after the space.
local function heads_of(owner, count)
  return redis.call('ZRANGEBYLEX', HEADS, '[' .. owner .. ' ', '(' .. owner .. '!', 'LIMIT', 0, count)
end

local function read(id)
  local text = redis.call('HGET', TICKETS, id)
  if not text then
    return nil
  end
  local seq, tokens, priority, owner = string.match(text, '^(%d+) (%d+) (%-?%d+) (.*)$')
  return { id = id, seq = tonumber(seq), tokens = tonumber(tokens), priority = tonumber(priority), owner = owner }
end

local function insert(ticket)
  redis.call('ZADD', ORDER, digits(ticket.priority), place(ticket.id, ticket.seq))
  redis.call('ZADD', HEADS, 0, head(ticket.id, ticket.owner, ticket.priority, ticket.seq))
  redis.call('HSET', TICKETS, ticket.id, digits(ticket.seq) .. ' ' .. digits(ticket.tokens) .. ' '
    .. digits(ticket.priority) .. ' ' .. ticket.owner)
  redis.call('HINCRBY', SUMS, digits(ticket.priority), digits(ticket.tokens))
end

local function remove(ticket)
  redis.call('ZREM', ORDER, place(ticket.id, ticket.seq))
  redis.call('ZREM', HEADS, head(ticket.id, ticket.owner, ticket.priority, ticket.seq))
  redis.call('HDEL', TICKETS, ticket.id)
  local left = redis.call('HINCRBY', SUMS, digits(ticket.priority), digits(-ticket.tokens))
  if left <= 0 then
    redis.call('HDEL', SUMS, digits(ticket.priority))
  end
end
