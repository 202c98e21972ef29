//! The image for containers: a tar of an OCI image layout with one layer, made without a container engine.
//!
//! The layer holds the program, the libraries that it links, their loader, and the licences of all of these. There is no
//! distribution below it: no shell, no package manager, and nothing else to keep up to date.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, quietly};
use serde_json::{Value, json};

/// Licence of everything in the layer: ours, glibc's, and that of libgcc_s.
const LICENCES: &str =
    "(MIT OR Apache-2.0) AND LGPL-2.1-or-later AND (GPL-3.0-or-later WITH GCC-exception-3.1)";

/// The names of users and groups, which a daemon looks up (`--user`, `--metrics-group`): root's only.
const NAMES: [(&str, &str); 2] = [
    ("etc/passwd", "root:x:0:0:root:/:/usr/sbin/nologin\n"),
    ("etc/group", "root:x:0:\n"),
];

/// What an image is made from. The same gives the same bytes.
pub(super) struct OciImage<'a> {
    /// The tree of installed files.
    pub(super) tree: PathBuf,
    /// Seconds since 1970: the time of all files.
    pub(super) epoch: &'a str,
    pub(super) version: &'a str,
}

impl OciImage<'_> {
    /// Returns the name of the tar.
    pub(super) fn file(&self) -> Result<String> {
        Ok(format!(
            "cleave-{}-{}-oci.tar",
            self.version,
            architecture()?
        ))
    }

    /// Writes the tar into a folder. Returns its name and the digest of the image's manifest.
    pub(super) fn write(&self, out: &Path) -> Result<String> {
        let layout = out.join("image");
        empty_folder(&layout.join("blobs/sha256"))?;
        let layer = out.join("layer");
        self.plant(out, &layer)?;
        self.pack(&layer, &out.join("layer.tar"))?;
        let uncompressed = sum(&out.join("layer.tar"))?;
        quietly(out, "gzip -n layer.tar", &[])?;
        let compressed = sum(&out.join("layer.tar.gz"))?;
        let path = layout.join("blobs/sha256").join(&compressed);
        fs::rename(out.join("layer.tar.gz"), &path).at(&path)?;
        let size = fs::metadata(&path).at(&path)?.len();
        let architecture = architecture()?;
        let created = quietly(out, "date --utc --date=@{} +%FT%TZ", &[&self.epoch])?;
        let created = created.trim();
        let labels = json!({
            "org.opencontainers.image.created": created,
            "org.opencontainers.image.description": "vhost-user-blk daemon: disks for virtual machines",
            "org.opencontainers.image.licenses": LICENCES,
            "org.opencontainers.image.title": "cleave",
            "org.opencontainers.image.version": self.version,
        });
        let config = json!({
            "architecture": architecture,
            "os": "linux",
            "created": created,
            "config": {
                // As the units have it: it opens images and devices of the host, and gives up what serving does not need.
                "User": "0:0",
                "Entrypoint": ["/usr/bin/cleave"],
                "Cmd": ["--help"],
                "Env": ["PATH=/usr/bin"],
                "WorkingDir": "/",
                "Labels": labels,
                "StopSignal": "SIGTERM",
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{uncompressed}")]},
            "history": [{"created": created, "created_by": "cargo xtask dist"}],
        });
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(&layout, "config", &config)?,
            "layers": [{
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": format!("sha256:{compressed}"),
                "size": size,
            }],
            "annotations": labels,
        });
        let mut described = blob(&layout, "manifest", &manifest)?;
        let digest = described["digest"].as_str().unwrap_or_default().to_owned();
        described["platform"] = json!({"architecture": architecture, "os": "linux"});
        // What engines call an image that they load.
        described["annotations"] = json!({
            "io.containerd.image.name": format!("localhost/cleave:{}", self.version),
            "org.opencontainers.image.ref.name": self.version,
        });
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [described],
        });
        save(&layout.join("index.json"), &index.to_string())?;
        save(
            &layout.join("oci-layout"),
            &json!({"imageLayoutVersion": "1.0.0"}).to_string(),
        )?;
        let file = self.file()?;
        self.pack(&layout, &out.join(&file))?;
        fs::remove_dir_all(&layer).at(&layer)?;
        fs::remove_dir_all(&layout).at(&layout)?;
        Ok(format!("{file} {digest}"))
    }

    /// Lays out the layer.
    fn plant(&self, out: &Path, layer: &Path) -> Result {
        empty_folder(layer)?;
        let program = self.tree.join("usr/bin/cleave");
        let program = program.display();
        let install = "install -D --mode={} {} {}";
        let target = layer.join("usr/bin/cleave");
        quietly(out, install, &[&"755", &program, &target.display()])?;
        let linked = quietly(out, "ldd {}", &[&program])?;
        let files = libraries(&linked);
        if files.is_empty() {
            return Err(format!("ldd names no library: {linked}"));
        }
        for file in files {
            let target = within(layer, &file);
            let [from, to] = [file.display(), target.display()];
            quietly(out, install, &[&"755", &from, &to])?;
            let licence = licence(&file)?;
            let target = within(layer, &licence);
            let [from, to] = [licence.display(), target.display()];
            quietly(out, install, &[&"644", &from, &to])?;
        }
        for licence in ["copyright", "LICENSE-APACHE", "LICENSE-MIT", "THIRD-PARTY"] {
            let path = Path::new("usr/share/doc/cleave").join(licence);
            let [from, to] = [self.tree.join(&path), layer.join(&path)];
            quietly(out, install, &[&"644", &from.display(), &to.display()])?;
        }
        NAMES.iter().try_for_each(|(file, text)| {
            let path = layer.join(file);
            fs::create_dir_all(layer.join("etc")).at(&path)?;
            save(&path, text)
        })
    }

    /// Packs a folder, so that only its files decide on the bytes: not their order, owners and times, nor the umask.
    fn pack(&self, folder: &Path, file: &Path) -> Result {
        let normal =
            "--sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=gnu";
        let line = format!("tar {normal} --mtime=@{{}} -cf {{}} .");
        quietly(folder, &line, &[&self.epoch, &file.display()]).map(drop)
    }
}

/// Writes a JSON blob; returns the descriptor by which others refer to it.
fn blob(layout: &Path, kind: &str, value: &Value) -> Result<Value> {
    let (text, new) = (value.to_string(), layout.join("blobs/new"));
    save(&new, &text)?;
    let sum = sum(&new)?;
    let path = layout.join("blobs/sha256").join(&sum);
    fs::rename(new, &path).at(&path)?;
    Ok(json!({
        "mediaType": format!("application/vnd.oci.image.{kind}.v1+json"),
        "digest": format!("sha256:{sum}"),
        "size": text.len(),
    }))
}

fn sum(file: &Path) -> Result<String> {
    let said = quietly(Path::new("/"), "sha256sum {}", &[&file.display()])?;
    Ok(said.split(' ').next().unwrap_or_default().to_owned())
}

/// Returns the architecture's name, which is the same in Debian and in OCI.
fn architecture() -> Result<String> {
    let said = quietly(Path::new("/"), "dpkg --print-architecture", &[])?;
    Ok(said.trim().to_owned())
}

/// Returns the files that `ldd` names: the libraries, each behind an arrow, and their loader. The kernel's has no file.
fn libraries(linked: &str) -> Vec<PathBuf> {
    let paths = linked.lines().filter_map(|line| {
        let named = line.split_once("=> ").map_or(line, |(_, path)| path);
        named.split_whitespace().next()
    });
    let files = paths.filter(|path| path.starts_with('/'));
    files.map(PathBuf::from).collect()
}

/// Returns the licence of the package that a library comes with.
fn licence(file: &Path) -> Result<PathBuf> {
    let resolved = fs::canonicalize(file).at(file)?;
    // Where `/lib` is a link to `/usr/lib`, dpkg may know a file by either path.
    let short = resolved.strip_prefix("/usr").unwrap_or(&resolved);
    let short = Path::new("/").join(short);
    let said = quietly(Path::new("/"), "dpkg --search {}", &[&resolved.display()])
        .or_else(|_| quietly(Path::new("/"), "dpkg --search {}", &[&short.display()]))?;
    let package = said.split(':').next().unwrap_or_default();
    Ok(Path::new("/usr/share/doc").join(package).join("copyright"))
}

/// Returns the path of a file of this system in the layer.
fn within(layer: &Path, file: &Path) -> PathBuf {
    layer.join(file.strip_prefix("/").unwrap_or(file))
}

fn save(path: &Path, text: &str) -> Result {
    fs::write(path, text).at(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_and_their_loader_are_found_and_the_kernels_is_not() {
        let said = "\tlinux-vdso.so.1 (0x00007f98)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found = libraries(said);
        let wanted = [
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert_eq!(found, wanted.map(PathBuf::from));
        assert!(libraries("\tstatically linked\n").is_empty());
    }
}
