"""Which answers are temporary, and how long to wait before a request is repeated."""

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses of temporary problems: the request is repeated."""
FIRST_WAIT_S = 1.0
"""Wait before the first repetition; each later wait is twice as long."""
LONGEST_WAIT_S = 60.0
REPORT_S = 3600.0
"""How often a long wait for the coordinator is logged."""
