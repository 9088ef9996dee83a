"""The ladder's drafts without its kernels: a simulator, and what is measured and fitted with it."""
