"""``testbed links``: ``check`` measures every link of a scenario, ``report`` writes down how far each is off,
``plot`` draws it."""
