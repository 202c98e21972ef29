//! The description of a disk and a change of it, from one list of options.

/// Makes [`DiskConfig`](crate::DiskConfig) and [`Change`](crate::Change). The list has three parts: options that a disk is opened
/// with, options for the disks of a node alone, and options that can change while the disk is served. Those of the last part have a
/// default, that of their type, and are written in it without `Given`.
macro_rules! disk_options {
    (
        opened { $($(#[$opened_attribute:meta])* $opened:ident: $Opened:ty,)* }
        node { $($(#[$node_attribute:meta])* $node:ident: $Node:ty,)* }
        live { $($(#[$live_attribute:meta])* $live:ident: $Live:ty,)* }
    ) => {
        /// The description of a disk: the storage that it consists of, and how it is served. A field that is left out has its default.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
        #[serde(default, deny_unknown_fields)]
        pub struct DiskConfig {
            $(
                $(#[$opened_attribute])*
                #[serde(skip_serializing_if = "LeftOut::is_left_out")]
                pub $opened: $Opened,
            )*
            $(
                $(#[$node_attribute])*
                #[serde(skip_serializing_if = "LeftOut::is_left_out")]
                pub $node: $Node,
            )*
            $(
                $(#[$live_attribute])*
                #[arg(default_value_t)]
                #[serde(skip_serializing_if = "LeftOut::is_left_out")]
                pub $live: Given<$Live>,
            )*
        }

        /// The settings that are to change while a disk is served. A field that is left out stays as it is.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
        #[serde(default, deny_unknown_fields)]
        pub struct Change {
            $(
                $(#[$live_attribute])*
                #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
                pub $live: Option<<$Live as Setting>::Change>,
            )*
            /// How single vrings are waited for, by their numbers; null: as the others. It is not kept.
            #[arg(skip)]
            #[serde(skip_serializing_if = "VringModes::is_empty")]
            pub vrings: VringModes,
        }

        impl DiskConfig {
            /// The fields for the disks of a node alone.
            pub const NODE_FIELDS: &[&str] = &[$(stringify!($node)),*];

            /// Returns the names of the fields that were written.
            pub fn written(&self) -> Vec<&'static str> {
                let fields = [
                    $((stringify!($opened), self.$opened.is_left_out()),)*
                    $((stringify!($node), self.$node.is_left_out()),)*
                    $((stringify!($live), self.$live.is_left_out()),)*
                ];
                let written = fields.into_iter().filter(|(_, is_left_out)| !is_left_out);
                written.map(|(name, _)| name).collect()
            }

            /// Returns the name of a field in which the two mean something different.
            pub fn difference(&self, other: &DiskConfig) -> Option<&'static str> {
                let fields = [
                    $((stringify!($opened), self.$opened == other.$opened),)*
                    $((stringify!($node), self.$node == other.$node),)*
                    $((stringify!($live), self.$live == other.$live),)*
                ];
                let mut differing = fields.into_iter().filter(|(_, is_equal)| !is_equal);
                differing.next().map(|(name, _)| name)
            }

            /// Returns the settings after a change, each as if it had been asked for first.
            fn changed(&self, change: &Change) -> Result<DiskConfig, String> {
                let mut next = self.clone();
                $(
                    if let Some(change) = &change.$live {
                        let changed = Setting::changed(&self.$live, change);
                        next.$live = changed.map_err(|why| format!("{}: {why}", stringify!($live)))?;
                    }
                )*
                Ok(next)
            }
        }
    };
}
