"""Makes the configuration of a container from the DaemonSet, as a kubelet does.

The arguments are the bundle that was unpacked from the image, the folder of the manifests, the folder that stands for the
host's root, and the arguments of the program if they are to be others than the DaemonSet's.
"""

import json
import pathlib
import sys

import yaml

bundle, manifests, host = (pathlib.Path(path).absolute() for path in sys.argv[1:4])
documents = yaml.safe_load_all((manifests / "daemonset.yaml").read_text())
[daemon_set] = [document for document in documents if document["kind"] == "DaemonSet"]
pod = daemon_set["spec"]["template"]["spec"]
[node] = [container for container in pod["containers"] if container["name"] == "node"]
volumes = {volume["name"]: volume for volume in pod["volumes"]}
security = node["securityContext"]

file = bundle / "config.json"
config = json.loads(file.read_text())
process = config["process"]
process["args"] = process["args"][:1] + (sys.argv[4:] or node["args"])
process["terminal"] = False
process["user"] = {"uid": security["runAsUser"], "gid": security["runAsGroup"]}
process["noNewPrivileges"] = not security["allowPrivilegeEscalation"]
assert security["capabilities"]["drop"] == ["ALL"]
kept = [f"CAP_{name}" for name in security["capabilities"]["add"]]
process["capabilities"] = {each: kept for each in ("bounding", "effective", "permitted")}
# A kubelet leaves the limits as the runtime has them.
process.pop("rlimits", None)
config["root"]["readonly"] = security["readOnlyRootFilesystem"]
for mount in node["volumeMounts"]:
    volume = volumes[mount["name"]]
    source = host / volume.get("hostPath", {"path": mount["name"]})["path"].lstrip("/")
    source.mkdir(parents=True, exist_ok=True)
    options = ["rbind", "rslave" if "mountPropagation" in mount else "rprivate"]
    destination = mount["mountPath"]
    entry = {"destination": destination, "type": "bind", "source": str(source), "options": options}
    config["mounts"].append(entry)
config["linux"]["seccomp"] = json.loads((manifests / "seccomp.json").read_text())
file.write_text(json.dumps(config))
