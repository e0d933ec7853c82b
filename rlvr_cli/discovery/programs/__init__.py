"""Programs to start from, as files: each stands alone, as every program that is proposed does."""
