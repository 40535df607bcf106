"""Plug-ins that put Stemcache under engines of others. Each imports its engine; the services import none of them."""
