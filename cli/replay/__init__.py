"""`stemcache replay`: drives the manager alone with a trace."""
