"""Learning: run specifications, models, tasks, codecs, outer optimizers. Pure: no network, no trio."""
