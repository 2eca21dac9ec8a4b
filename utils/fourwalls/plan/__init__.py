"""Planning: which cut, which axis, which size, before anything is run.

A plan is data, priced by `cost` and checked by running it on ranks. `layouts` and `operators` describe a graph and the layouts
that its operators may have; `cuts` finds the cheapest; `execute` runs it.

    plan = argmin over legal plans of cost(plan)

Reference: DESIGN, "The layout".
"""
