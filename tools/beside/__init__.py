"""Which of two drafts to take, from a recording of both at every position."""

import tools.verify  # noqa: F401 (the rule is the reference's, in tests/)
