"""`stemcache replay`: drives the manager alone with a trace, or with seeded requests."""
