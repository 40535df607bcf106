"""`stemcache eval`: the same questions by every way in which a prefix can be obtained; `command` is where it begins."""
