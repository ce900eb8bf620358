"""Two hosts over a slow link: sharding over it, copies over it, and DiLoCo."""
