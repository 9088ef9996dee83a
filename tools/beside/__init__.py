"""Which of two drafts to take, from a recording of both at every position."""
