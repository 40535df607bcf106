"""Items of work handed from the warp that finds them to those that compute them, in a Hopper kernel; see `kernel`."""
