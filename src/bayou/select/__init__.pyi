from bayou.select.layers import with_dropout as with_dropout
from bayou.select.named import by_name as by_name, list_methods as list_methods
from bayou.select.planning import plan as plan
from bayou.select.plans import Plan as Plan
from bayou.select.recipes import (
    Auto as Auto,
    HeldOut as HeldOut,
    NamedMethod as NamedMethod,
    Recipe as Recipe,
)
from bayou.select.settings import Training as Training
