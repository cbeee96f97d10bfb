"""What every store asks of a ticket, and what it gives an owner that has not beaten yet.

The ranges are those that survive a double, a Redis integer and a fixed-width key, so that all stores agree on them.
"""

from router.queue.store import Ticket

#: An owner's first lease, from its first ticket to its first `beat`, so that a replica that dies in between leaves
#: nothing behind for ever. Longer than any sane beat interval, shorter than a client's patience for a stuck queue.
OWNER_GRACE_S = 30.0

#: Largest integer that a double (and so Lua) holds exactly.
TOKENS_MAX = 2**53 - 1

#: `priority` lies in [-PRIORITY_MAX, PRIORITY_MAX]; it is stored with an offset in ten digits.
PRIORITY_MAX = 2**31 - 1


def check_ticket(ticket: Ticket) -> None:
    """Refuse what no store can hold; a mistake of the caller, so clients' numbers are clamped before.

    Raises:
        ValueError: `tokens` not in 1 to `TOKENS_MAX`, `priority` out of range, or an empty id or owner.
    """
    if not 1 <= ticket.tokens <= TOKENS_MAX:
        raise ValueError(f"a ticket's tokens must be 1 to {TOKENS_MAX}, got {ticket.tokens}")
    if not -PRIORITY_MAX <= ticket.priority <= PRIORITY_MAX:
        raise ValueError(f"a ticket's priority must be within +-{PRIORITY_MAX}, got {ticket.priority}")
    if not ticket.id or not ticket.owner:
        raise ValueError("a ticket needs an id and an owner")


def check_place(ticket: Ticket) -> None:
    """Refuse to put back what never had a place.

    Raises:
        ValueError: as `check_ticket`, or `seq` not in 1 to 2**53 - 1.
    """
    check_ticket(ticket)
    if not 1 <= ticket.seq <= TOKENS_MAX:
        raise ValueError("only a ticket that the store gave a place to can be put back")
