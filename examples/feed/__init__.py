"""Shows how a replica drafts from text that another replica publishes."""
