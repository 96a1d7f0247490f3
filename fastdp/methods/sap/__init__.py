"""SAP: text or its embeddings are privatized by the customer before a vendor sees them; CTI spares what the task needs."""

from fastdp.methods.sap.bottom import PrivateBottom as PrivateBottom, add_dchi_noise as add_dchi_noise
from fastdp.methods.sap.cti import CTI as CTI
from fastdp.methods.sap.importance import (
    adaptive_eta as adaptive_eta,
    count_tokens as count_tokens,
    middle_importance as middle_importance,
    noised_counts as noised_counts,
    utility_importance as utility_importance,
)
from fastdp.methods.sap.privatizer import (
    Displacement as Displacement,
    SAPPerturbation as SAPPerturbation,
    TextPrivatizer as TextPrivatizer,
)
from fastdp.methods.sap.quotient import (
    Quotient as Quotient,
    equal_mass_cells as equal_mass_cells,
    informative_cells as informative_cells,
)
from fastdp.methods.sap.split import Bottom as Bottom, split_model as split_model
