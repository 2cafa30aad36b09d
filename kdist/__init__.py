"""kdist: hybrid-parallel training for Keras 3 on TensorFlow."""
import os
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import tensorflow as tf

from kdist.config import ParallelConfig
from kdist.declare import shard
from kdist.mesh import mesh
from kdist.parallel import parallelize

def init(cpu_devices=None):
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],[tf.config.LogicalDeviceConfiguration()]*cpu_devices)
