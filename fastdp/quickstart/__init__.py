"""`fastdp quickstart`: a small public model, records of people who do not exist, and what privacy costs on them."""

from importlib import resources

#: The folder of the model that ships with the package.
MODEL = str(resources.files(__name__).joinpath("model"))
