"""Plug-ins that put Stemcache under other projects' engines. Each imports its engine; the services import none."""
