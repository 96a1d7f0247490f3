"""`fastdp quickstart`: a small public model, records of people who do not exist, and what privacy costs on them."""

from importlib import resources

#: The folder of the model that ships with the package: a GPT-2 of 4 layers, trained on `corpus.public_text` alone, by
#: fastdp/quickstart/recipe.py of commit 8c742698.
MODEL = str(resources.files(__name__).joinpath("model"))
