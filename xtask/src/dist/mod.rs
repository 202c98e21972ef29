//! `cargo xtask dist`: a tree of all files as they are installed, and from it a tarball, a `.deb`, a `.rpm` and an image for
//! containers. Source packages are built by it too.
//!
//! The program links the C library dynamically, and nothing else but libgcc_s: a statically linked glibc could load no
//! library at run time, and the packages name the oldest glibc that will do.

mod check;
mod image;
mod notice;
mod recipe;
mod source;

use std::env::consts::ARCH;
use std::fmt::Display;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, execute, quietly, words};
use cleave_rig::{built, setup};

use self::recipe::{Recipe, VERSION};
use crate::book;
use crate::step::step;

/// Where to, and from what.
#[derive(clap::Args, Default)]
pub(crate) struct DistArgs {
    /// Write to this folder [default: target/dist, or target/source with --source]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package this program instead of building it, without the pages as HTML
    ///
    /// Such a package is for a test. A release, which is built here, has them in usr/share/doc/cleave/html, as `cargo xtask book`
    /// makes them.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Make nothing else, as the builds of source packages do, and no pages as HTML
    #[arg(long, value_name = "PART", conflicts_with = "check")]
    only: Option<Single>,
    /// Make source packages for Debian and rpm instead, which build without network
    #[arg(long, conflicts_with_all = ["program", "only"])]
    source: bool,
    /// Then install the .deb in a copy of this system (as root), check what is installed, and run the image for containers; with
    /// --source, build the source packages, and check what comes of them
    #[arg(long)]
    check: bool,
}

/// The part of the release that a source package is built into.
#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Single {
    /// The tree of installed files
    Tree,
    /// The .deb, from the folder `debian` of the sources where there is one
    Deb,
}

impl DistArgs {
    /// Returns the options with which the tests package the program that they have tested. Building it a second time as it is
    /// released takes more than a minute, and tells nothing about packages.
    pub(crate) fn checked(program: PathBuf) -> DistArgs {
        DistArgs {
            program: Some(program),
            check: true,
            ..DistArgs::default()
        }
    }
}

/// Files of the sources, and where they are installed.
const FILES: &str = "\
dist/cleave.service usr/lib/systemd/system/cleave.service
dist/cleave@.service usr/lib/systemd/system/cleave@.service
dist/cleave@.socket usr/lib/systemd/system/cleave@.socket
dist/cleave.sysusers usr/lib/sysusers.d/cleave.conf
dist/cleave.tmpfiles usr/lib/tmpfiles.d/cleave.conf
dist/50-cleave.json usr/share/qemu/vhost-user/50-cleave.json
dist/copyright usr/share/doc/cleave/copyright
LICENSE-APACHE usr/share/doc/cleave/LICENSE-APACHE
LICENSE-MIT usr/share/doc/cleave/LICENSE-MIT
dist/grafana.json usr/share/cleave/grafana.json
dist/kubernetes/daemonset.yaml usr/share/cleave/kubernetes/daemonset.yaml
dist/kubernetes/seccomp.json usr/share/cleave/kubernetes/seccomp.json";

/// Completions as the program writes them, and where shells look for them.
const COMPLETIONS: &str = "\
cleave.bash usr/share/bash-completion/completions/cleave
_cleave usr/share/zsh/vendor-completions/_cleave
cleave.fish usr/share/fish/vendor_completions.d/cleave.fish";

/// The release that is packaged.
struct Release {
    out: PathBuf,
    /// The tree of installed files.
    tree: PathBuf,
    recipe: Recipe,
}

/// Makes all archives and `SHA256SUMS`; prints their paths.
pub(crate) fn run(root: &Path, request: &DistArgs) -> Result {
    let usual = ["target/dist", "target/source"][usize::from(request.source)];
    let out = request.out.clone().unwrap_or_else(|| root.join(usual));
    let out = std::path::absolute(&out).at(&out)?;
    if request.source {
        source::run(root, &out)?;
        return match request.check {
            true => check::rebuild(root, &out),
            false => Ok(()),
        };
    }
    let needed: &[&str] = match request.only {
        Some(Single::Tree) => &["strip"],
        Some(Single::Deb) => &["strip", "dpkg-deb", "dpkg-gencontrol"],
        None => &["strip", "dpkg-deb", "dpkg-gencontrol", "rpmbuild"],
    };
    setup::provide_programs(root, needed)?;
    let program = match &request.program {
        Some(program) => program.clone(),
        None => built::released(root)?,
    };
    let release = Release {
        tree: out.join("tree"),
        recipe: Recipe::new(root, recipe::epoch(root)?)?,
        out,
    };
    empty_folder(&release.out)?;
    step("tree", "see above", || release.plant(root, &program))?;
    if request.program.is_none() && request.only.is_none() {
        book::build(root, &release.documents().join("html"))?;
    }
    if request.only != Some(Single::Tree) {
        step("deb", "see above", || release.deb(root))?;
    }
    if request.only.is_some() {
        return Ok(());
    }
    step("tarball", "see above", || release.tarball())?;
    step("rpm", "see above", || release.rpm(root))?;
    step("image", "see above", || release.image().write(&release.out))?;
    step("sums", "see above", || release.sums())?;
    match request.check {
        true => check::run(root, &release.out, &release.image(), VERSION),
        false => Ok(()),
    }
}

impl Release {
    /// Lays out the tree.
    fn plant(&self, root: &Path, program: &Path) -> Result<String> {
        self.install(root, FILES)?;
        let documents = self.documents();
        book::copy(root, &book::index::pages(root)?, &documents)?;
        // Where Debian's programs look for it.
        let changelog = [documents.join("changelog.md"), documents.join("changelog")];
        copy(&changelog[0], &changelog[1], 0o644)?;
        quietly(&documents, "gzip -9n changelog", &[])?;
        let installed = self.tree.join("usr/bin/cleave");
        copy(program, &installed, 0o755)?;
        quietly(root, "strip {}", &[&installed.display()])?;
        self.pages(root, program)?;
        let notices = documents.join("THIRD-PARTY");
        fs::write(&notices, notice::third_party(root)?).at(&notices)?;
        let settings = self.tree.join("etc/cleave");
        fs::create_dir_all(&settings).at(&settings)?;
        Ok(format!("{} KiB", self.kib()?))
    }

    /// Folder of the pages: as Markdown for hosts without a browser, each with links to the others.
    fn documents(&self) -> PathBuf {
        self.tree.join("usr/share/doc/cleave")
    }

    /// Man pages and completions, which the program writes itself.
    fn pages(&self, root: &Path, program: &Path) -> Result {
        let folder = self.tree.join("usr/share/man/man1");
        empty_folder(&folder)?;
        let line = "{} --write-pages {}";
        quietly(root, line, &[&program.display(), &folder.display()])?;
        self.install(&folder, COMPLETIONS)?;
        let pack = "find . -type f ! -name '*.1' -delete && gzip -9n *.1";
        quietly(&folder, "sh -c {}", &[&pack]).map(drop)
    }

    /// Copies the files of a list into the tree.
    fn install(&self, folder: &Path, files: &str) -> Result {
        let mut files = files.lines().filter_map(|line| line.split_once(' '));
        files.try_for_each(|(from, to)| copy(&folder.join(from), &self.tree.join(to), 0o644))
    }

    fn tarball(&self) -> Result<String> {
        let (name, epoch) = (format!("cleave-{VERSION}"), &self.recipe.epoch);
        let file = format!("{name}-{ARCH}-linux.tar.gz");
        let line = format!(
            "tar --sort=name --owner=0 --group=0 --mtime=@{epoch} --transform=s,^\\.,{name}, -C tree -czf {file} ."
        );
        quietly(&self.out, &line, &[]).map(|_| file)
    }

    fn deb(&self, root: &Path) -> Result<String> {
        let (own, made) = (root.join("debian"), self.out.join("debian"));
        // Of a source package, which somebody may have changed.
        let debian = match own.is_dir() {
            true => own,
            false => {
                self.recipe.write_debian(&made)?;
                made
            }
        };
        let package = self.out.join("deb");
        quietly(&self.out, "cp -a tree {}", &[&package.display()])?;
        for (from, to, mode) in [
            ("postinst", "DEBIAN/postinst", 0o755),
            ("postrm", "DEBIAN/postrm", 0o755),
            ("prerm", "DEBIAN/prerm", 0o755),
            ("changelog", "usr/share/doc/cleave/changelog.Debian", 0o644),
            (
                "cleave.lintian-overrides",
                "usr/share/lintian/overrides/cleave",
                0o644,
            ),
        ] {
            copy(&debian.join(from), &package.join(to), mode)?;
        }
        quietly(
            &package,
            "gzip -9n usr/share/doc/cleave/changelog.Debian",
            &[],
        )?;
        let libraries = format!(
            "libc6 (>= {}), libgcc-s1",
            glibc(&self.tree.join("usr/bin/cleave"))?
        );
        let line =
            "dpkg-gencontrol -c{}/control -l{}/changelog -f{}/files -Pdeb -Vshlibs:Depends={}";
        let folder = debian.display();
        quietly(&self.out, line, &[&folder, &folder, &folder, &libraries])?;
        // It notes the name of the package there, which has the version of the changelog.
        let files = debian.join("files");
        let noted = fs::read_to_string(&files).at(&files)?;
        let file = noted.split(' ').next().unwrap_or_default().to_owned();
        let line = "env SOURCE_DATE_EPOCH={} dpkg-deb --root-owner-group -Zxz -z4 --build deb {}";
        quietly(&self.out, line, &[&self.recipe.epoch, &file])?;
        fs::remove_dir_all(&package).at(&package)?;
        Ok(file)
    }

    fn rpm(&self, root: &Path) -> Result<String> {
        let (build, spec) = (self.out.join("rpm"), self.out.join("cleave.spec"));
        self.recipe.write_spec(&spec)?;
        let name = "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm";
        let epoch = &self.recipe.epoch;
        let mut line = words("env SOURCE_DATE_EPOCH={} rpmbuild -bb", &[epoch]);
        let definitions: [(&str, &dyn Display); 4] = [
            ("_topdir", &build.display()),
            ("_rpmdir", &self.out.display()),
            ("_build_name_fmt", &name),
            ("cleave_tree", &self.tree.display()),
        ];
        line.extend(definitions.map(|(name, value)| format!("--define={name} {value}")));
        line.push(spec.display().to_string());
        execute(root, &line)?;
        fs::remove_dir_all(&build).at(&build)?;
        Ok(format!("cleave-{VERSION}-1.{ARCH}.rpm"))
    }

    fn image(&self) -> image::OciImage<'_> {
        image::OciImage {
            tree: &self.tree,
            epoch: &self.recipe.epoch,
            version: VERSION,
        }
    }

    fn sums(&self) -> Result<String> {
        let sum = "sha256sum *.tar.gz *.deb *.rpm *-oci.tar > SHA256SUMS";
        quietly(&self.out, "sh -c {}", &[&sum])?;
        Ok(self.out.join("SHA256SUMS").display().to_string())
    }

    /// Returns the size of the tree, as `du` prints it before the name.
    fn kib(&self) -> Result<String> {
        let said = quietly(&self.tree, "du -sk .", &[])?;
        Ok(said.split_whitespace().next().unwrap_or("0").to_owned())
    }
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result {
    let folder = to.parent().unwrap_or(to);
    fs::create_dir_all(folder).at(folder)?;
    fs::copy(from, to).at(from)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).at(to)
}

/// Returns the newest version of glibc whose symbols the program needs; the file names each of them.
fn glibc(program: &Path) -> Result<String> {
    let bytes = fs::read(program).at(program)?;
    let text = String::from_utf8_lossy(&bytes);
    let versions = text.split("GLIBC_2.").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        rest.get(..end)?.parse::<u32>().ok()
    });
    let newest = versions.max().ok_or("the program needs no glibc")?;
    Ok(format!("2.{newest}"))
}
