"""`fastdp quickstart`: a small public model, records of people who do not exist, and what privacy costs on them."""
