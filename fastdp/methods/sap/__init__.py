"""SAP: text or its embeddings are privatized by the customer before a vendor sees them; CTI spares what the task needs."""

from fastdp.methods.sap.bottom import PrivateBottom as PrivateBottom
from fastdp.methods.sap.bottom import add_dchi_noise as add_dchi_noise
from fastdp.methods.sap.cti import CTI as CTI
from fastdp.methods.sap.importance import adaptive_eta as adaptive_eta
from fastdp.methods.sap.importance import count_tokens as count_tokens
from fastdp.methods.sap.importance import middle_importance as middle_importance
from fastdp.methods.sap.importance import noised_counts as noised_counts
from fastdp.methods.sap.importance import utility_importance as utility_importance
from fastdp.methods.sap.privatizer import Displacement as Displacement
from fastdp.methods.sap.privatizer import SAPPerturbation as SAPPerturbation
from fastdp.methods.sap.privatizer import TextPrivatizer as TextPrivatizer
from fastdp.methods.sap.quotient import Quotient as Quotient
from fastdp.methods.sap.quotient import equal_mass_cells as equal_mass_cells
from fastdp.methods.sap.split import Bottom as Bottom
from fastdp.methods.sap.split import split_model as split_model
