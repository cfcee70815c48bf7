from mlflow.tracking.context import registry as registry
