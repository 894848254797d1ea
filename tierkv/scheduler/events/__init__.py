"""Events for engines and routers."""
