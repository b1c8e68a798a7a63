"""Grafana dashboards as code: `python -m deploy.grafana` writes dashboards/*.json.

`panels` knows how a panel looks, `boards` how a dashboard is put together; `service_board` and `model_board`
say what is shown. None of them is part of the served package.
"""
