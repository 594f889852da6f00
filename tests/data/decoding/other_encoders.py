"""Small JPEGs of kinds that neither Pillow nor simplejpeg writes, by libjpeg-turbo 2.1 and 3.1,
liblj92 and CharLS. All show `PIXELS`, or its red alone, at the depth that the name says."""

from base64 import b85decode

import numpy as np

_ROWS, _COLUMNS = np.mgrid[:40, :36]
PIXELS = np.stack([5 * _ROWS + _COLUMNS, 6 * _COLUMNS, _COLUMNS * _ROWS // 8 + 60], axis=2).astype(
    np.uint8
)

FILES = {
    "lossless": b85decode(
        "|JeWT01iQ9Z(?NtWB>pF0095P01*fPC;%h_QV{@05dcCF0RO}Q7ytnQ0RaI30000000000000010|*EI+5ij"
        "#QUFH)LI4B+0O$UH^SiR_yDrPJ?7J?@vh2Gq%d+gdF3Ym)yDrPJ?7J?@vh2Gq%d+gdF3Ym)yEOm+08jt`6aW"
        "AP0003%8h`?T005u>04M+e3IG5NKng%m04V`L0Hg%~0+18{3#bZ0fB-"
        "29005*Y00NMp018b&04WLp0Hi1Y0+65p3POMepaldd02C0Q08m1J0YM4?1=IinfB*oX001Ze015yAY7_tf1p"
        "oj6KmY(x000yXKmY&~000F500BS%08j>?0H6Q>C;$Ko0007j00U40kQ4w4Ku`cF0YCtx1por-"
        "0+65p3POMYDGC4pq$mIalTZK(LVy4%3IG74C;$SGpaG}>K?(o`1SkL$5TF21LVy8v005u>04M+e3IG5CfB+h"
        "W0003%002+`02BZK1p`n300jU50YCr%PyhfF0jK~d000UA00Mvj0H6Q>)BvOf00NK{017}*04V`L0J?yrC;$"
        "SGpa2R&fB-29005-a00NMp0185Y04WLp0Hi1YY5-6|fB``Y00jgn02C0Q09`-"
        ";C;$Ko0007j005u>2BAOz08jt`6aWAP0003%)BpehKmY(x000yK00jVQ015yA0)PMjpa1|U001=rDFHwLqy+"
        "#1kQ4w4Ku`cKpeYIf0Hi1Y0+65p3POMYDK!89q$mIake~nxLVy4%3IG~_6cC^QP(pwKK?(o`1SkL(Pyh-"
        "500Mvj0H6Q>C;$PdPyhfF000F500BS%08ljm002+`02BZK1poj6KpKDofB*oX001Ze015yA4L}M&Pyi_bKme"
        "o#00NK{01K!JLVy4%3IG74C;$SGpa2R@KmaKU005*Y00NMp0185Y2A~B5C;$`?pa4)pfB``Y00q<l0)PMjpa"
        "1|U000UA0Du44"
    ),
    "lossless, grey": b85decode(
        "|JeV;02crO0RaI30000000000000020|5yC!vG5i04M+?0RRyI|Jncu0RR97008Ix-QC^Y-QC^Y-QC^Y-"
        "QC^Y-"
        "K%Z3+ikYnZMNHOw%cy4w%cvC+ikYnZMNHOy0+VGw%cvC+ikYnZMN#$ZMNHOw%cvC+ikYnt8KR1ZMNHOw%cvC"
        "+itD4+ikYnZMNHOw%cvGw%cvC+ikYnZMNHOw(8q$w%cvC+ikYnZMNI1ZMNHOw%cvC+ikYnZmqW4ZMNHOw%cv"
        "C+ikkG+ikYnZMNHOw%cvC>f3F$+ikYnZMNHOw%e<1w%cvC+ikYnZMNHPt+v~3w%cvC+ikYnZMwGGZMNHOw%c"
        "vC+ikY$+ikYnZMNHOw%cvC+pBH1+ikYnZMNHOw%cy4w%cvC+ikYnZMNHOy0+VGw%cvC+ikYnZMN#$ZMNHOw%"
        "cvC+ikYnt8KR1ZMNHOw%cvC+itD4+ikYnZMNHOw%cvGw%cvC+ikYnZMNHOw(8q$w%cvC+ikYnZMNI1ZMNHOw"
        "%cvC+ikYnZmqW4ZMNHOw%cvC+ikkG+ikYnZMNHOw%cvC>f3F$+ikYnZMNHOw%e<1w%cvC+ikYnZMNHPt+v~3"
        "w%cvC+ikYnZMwGGZMNHOw%cvC+ikY$+ikYnZMNHOw%cvC+pBH1+ikYnZMNHOw%cy4w%cvC+ikYnZMNHOy0+V"
        "Gw%cvC+ikYnZMN#$ZMNHOw%cvC+ikYnt8KR1ZMNHOw%cvC+itD4+ikYnZMNHOw%cvGw%cvC+ikYnZMNHOw!r"
        "_{"
    ),
    "baseline": b85decode(
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOF"
        "u3lJ6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ci"
        "K`6ciK`6ciK`6ciK`6ciK`6ciK`6cqo!01*fPC;%h_0TBQK5di}c0sq7R6#xMN000000000000000000LG|H"
        "J?u5C8!M00RL50000000000000C91|c#65hM~K|HJ?q0RaF500RI3000000000000smF2mt~I|HJ?v5dZ=L0"
        "R;g80000000000000C75dr}rA~9hS6aU%(3<CiG0ucid06zeo(Zo2RvpLxrl{^%qh%-"
        "S}b+DT%cqzvl`}v@=IM`8@1t{Zpe>4?lI|;I=j)k|)#)Gm$$TcFoiNza3nlz00*|%C#y@goX4ADbAwh?Jh1z"
        "6jDD4?Gk2{fmItZlm=l7eXLB+{Zf7VkG2DRYN##ESAJ)M*YV_L(!YakQs`ylDm~tCL#@G@!8>Z^adIV_^oA@"
        "K=pDckxABk=Q|{M3fD_ZZubA4&iwf<V_gL98u^QXJ+bYPX(yT3{e*?Y#h>p)MdXEM#~!qG^n!~Zp9I@j={|<"
        "*qDL0&BloO!WNNUT@xNKhZI|V*}Pj*y@kla3{l$b7}}l-"
        "k%s(H&&`7ySG|SU!*(d=^RR1b_9mch^6{g$;uMiyT_6A1"
    ),
    "arithmetic": b85decode(
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOF"
        "u3lJ6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ci"
        "K`6ciK`6ciK`6ciK`6ciK`6ciK`6cqo-"
        "01*fPC;%h_0TBQK5di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zf#0PKu4L&Rq24}{w?ogjn@P<N!9$b`S"
        "Ml1GZiOQ6nCeg4crA%|N0bjrFL_5nq@UYB7QI-"
        "t4rkLd)U7F9}WzIrJ|dwF@m;SZN7%;6V;jg<M}pgZb>Cflw;nttdZJ!_`gXU}t%;EZV!e}z>CGjSqj`6?9dM"
        "YpNM_;&AzEH9WO3fM($M_g$#e|y8X;@PDb=Q!QjZkB+``e&0&M$%@s9=qK{lOh`&D>{spHu$L)&(U>u8j)GC"
        "lZEJEoCNA`r1Z$gS!xSfw>>tiT`U|%xi?&Pe$q0pbI<AxFpTBv>|4CbVgXZ<M?RkhV9gV85LjAt@!X;?!2j6"
    ),
    "arithmetic, progressive": b85decode(
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOF"
        "u3lJ6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ci"
        "K`6ciK`6ciK`6ciK`6ciK`6ciK`6cqo;01*fPC;%h_0TBQK5di}c0sqVZ1^^HN5dYc$3<CiG0uTcb000610N"
        "E>n4}~=2Qz79PkMS6PqzcXoT791R6sHxn-"
        "~Rw2^S*SV8Ya&)0~OwK3`GZ`Gx`uE4MswQ{>UH!qDlsUQTmV1o!}h1pXmS000a;P|Jncu0RaF31p*Z;QTXhi"
        "ArMbV9aKlt+!hzt4(iIIq>En<WtfR)CI8F-1Q7-"
        "Q+5iXv0|5a)0YoNqf5n(y&me<BhoAI%K@=eT;G#hP%m4%t1^?Or2mt~C0Y3pl5~MSzRS#s&#e#ZM-"
        "3nYgqH}j>m^lB;00a;P|Jncu0RaF8KLW7-"
        "%m4%s1^?Or2mt{A0Y4$tbkkVi5$Ok~pKlX2v|q;m+5ij#0RRF30{{R35X)12Zys}vq$7a;%m4%t1^?Or2mu2"
        "D0Y4DaK!XH!+JyxME%)_aH<xLOmMS3s%m4%t1^?Or2mt~C0Y4Dh&r108NSSauZHCkoAwd7k00a;P|Jncu0Ra"
        "F3KM<)3NpQ*eWNIKUks`}9braBT?lU>y|Je"
    ),
    "12 bits": b85decode(
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00IF40RaI50RaI50s;a81OoyB0s;jD1Oo&H1qKEN1qKEN2MGuU2MGr"
        "T1_%oX2?`1d3JL}Y3k(Yi3<(Mf3je_X3k(1#03-"
        "nc5di<h02TlN0RaF200000000000000A2@U_m03r|o00jdC0{{R300000000002@5DiG*aRL1P3QkVPgN<00"
        ";pA002J##Xl{ylV}??u^5B^TWKcHHfv%r2mrRyO`vSn#9|NuZKRt(*{z7gTMi0IH?8(fo6JY8K0;6}w3BEXH"
        "L)0k09$D$&^BvgF$e&*(oLXj*2H2E0d1t4K-"
        "sN`#9IyuNjI(bO`FU|tv*6fEwqzp8#S>QgaBJ<CeSu(VlfB+w$e?YY}UkL5CLtZn?TvEh{RhC3Q0Gu_D!42N"
        "3A|WP%X5RXd5-"
        "L7=!>@X(rG%Yhp170JhRiplsH}Vh{msq?<t5t%$^14hl&(t@cfu%tx(0LQpNVlV}??u^5B^TWKcHHfv%r2mr"
        "RyO`vSn#9|NuZKRt(*{z7gTMi0IH?8(fo6JY8K1cuA"
    ),
    "lossless, 12 bits": b85decode(
        "|JeV;02crO0RaI30000000000000062L%lO!vG5m04M+?0RRyI|Jncu0RR97008Iz0MO9T(9qD((9qD((9qD"
        "((9qD((9qD((9qD((9qD((9qD(s3=gOLWK$xC{Uq7g$fiXP@zJF3KS?%p+bcU6ev)lprJyA3KS?%p+bcU6ev"
        ")kLWK$xC{Uq7g$fiXP@zJKf`tkcC{Uq7g$fiXP@zJF3KS?%p+bcU6ev)kLWK${3KS?%p+bcU6ev)kLWK$xC{"
        "Uq7g$fiXP@zJF3KS@)C{Uq7g$fiXP@zJF3KS?%p+bcU6ev)kLWK$xC{UuHp+bcU6ev)kLWK$xC{Uq7g$fiXP"
        "@zJF3KS?%p+bs+g$fiXP@zJF3KS?%p+bcU6ev)kLWK$xC{Uq7g$gPP6ev)kLWK$xC{Uq7g$fiXP@zJF3KS?%"
        "p+bcU6ey@DP@zJF3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXP@<rrLWK$xC{Uq7g$fiXP@zJF3KS?%p+bcU6ev)"
        "kLW+Wg3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXP@zJF3MvW|C{Uq7g$fiXP@zJF3KS?%p+bcU6ev)kLWK$xD5x"
        "k<p+bcU6ev)kLWK$xC{Uq7g$fiXP@zJF3KS?%qM)Hdg$fiXP@zJF3KS?%p+bcU6ev)kLWK$xC{Uq7ih_j-"
        "6ev)kLWK$xC{Uq7g$fiXP@zJF3KS?%p+bcUDhd=RP@zJF3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXs3=gOLWK$"
        "xC{Uq7g$fiXP@zJF3KS?%p+bcU6ev)lprJyA3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXP@zJKf`tkcC{Uq7g$f"
        "iXP@zJF3KS?%p+bcU6ev)kLWK${3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXP@zJF3KS@)C{Uq7g$fiXP@zJF3K"
        "S?%p+bcU6ev)kLWK$xC{UuHp+bcU6ev)kLWK$xC{Uq7g$fiXP@zJF3KS?%p+bs+g$fiXP@zJF3KS?%p+bcU6"
        "ev)kLWK$xC{Uq7g$gPP6ev)kLWK$xC{Uq7g$fiXP@zJF3KS?%p+bcU6ey@DP@zJF3KS?%p+bcU6ev)kLWK$x"
        "C{Uq7g$fiXP@<rrLWK$xC{Uq7g$fiXP@zJF3KS?%p+bcU6ev)kLW+Wg3KS?%p+bcU6ev)kLWK$xC{Uq7g$fi"
        "XP@zJF3MvW|C{Uq7g$fiXP@zJF3KS?%p+bcU6ev)kLWK$xD5xk<p+bcU6ev)kLWK$xC{Uq7g$fiXP@zJF3KS"
        "?%qM)Hdg$fiXP@zJF3KS?%p+bcU6ev)kLWK$xC{Uq7ih_j-"
        "6ev)kLWK$xC{Uq7g$fiXP@zJF3KS?%p+bcUDhd=RP@zJF3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXs3=gOLWK$"
        "xC{Uq7g$fiXP@zJF3KS?%p+bcU6ev)lprJyA3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXP@zJKf`tkcC{Uq7g$f"
        "iXP@zJF3KS?%p+bcU6ev)kLWK${3KS?%p+bcU6ev)kLWK$xC{Uq7g$fiXP@zJF3KS@)C{Uq7g$fiXP@zJF3K"
        "S?%p+bcU6ev)kLWK$xC{UuHp+bcU6ev)kLWK$xC{Uq7g$fiXP@zJF3KS?%p+bs+g$fiXP@zJF3KS?%p+bcU6"
        "ev)kLWK$xC{Uq7g$e-w*#"
    ),
    "JPEG-LS": b85decode(
        "|JeWN03cIPNk&Eh0ssI30000e0000a3J3-"
        "P0003j0003j|L6b+00001|JeWc01F5JC;%h@0TBTI+5iXv0RR910IjzDzyE*xfB%2x(!c+I|8c+nfB$|X|9}"
        "5~?*D)PfB8TEfB%2K|9}5~zyE*#f4~2K|9`*#fB%2K|9}5~KmULKe?R|!|9^k~fB$~}fB%2||9}5~`~QFcfA"
        "{}?|9|iQfB%2q|9}5~zyE*#e}Dgf|9<~}|9}1efB%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~f"
        "B%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~fB%2~VE@?"
    ),
    "lossless, 16 bits": b85decode(
        "|JeV;02crO0RaI300000000000000A3keYa!vG5q04M+?0RRyI|Jncu0RR97008X(&<z044FJ#$0MHEp&<z0"
        "44FJ#$0MHEp&<z044FJ#$0MHEp&<z044FJ#$0MHEp&<y~n0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<O"
        "qZ6as)y3IRYU1puHF0)S8o0-"
        "y>3Kqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv};C<OqZ6as)y3IRYU1puHF0"
        ")S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZDgdAq0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ"
        "6as)y3IRYU1puHF0)VIjfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnopb7y"
        "%C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<=fm1puHF0)S8o0YE4P0H72CfKU"
        "nnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHb0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)"
        "S8o0YE4P0H72CfT#k1PznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznN|3IRYU1"
        "puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU3V<jD0H72CfKUnnKqv(OpcDdtPznJ+"
        "C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H7)WpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUn"
        "nKqv(OpcDdtr~-"
        "gc3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3Id=C0YE4P0H72CfKUnnKqv(Opc"
        "DdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4UfG7n3pcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0"
        "H72CfKUnnKqv(Opeg{M6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as*#0)S8o"
        "0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0-"
        "y>3Kqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv};C<OqZ6as)y3IRYU1puHF0"
        ")S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZDgdAq0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ"
        "6as)y3IRYU1puHF0)VIjfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnopb7y"
        "%C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<=fm1puHF0)S8o0YE4P0H72CfKU"
        "nnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHb0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)"
        "S8o0YE4P0H72CfT#k1PznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznN|3IRYU1"
        "puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU3V<jD0H72CfKUnnKqv(OpcDdtPznJ+"
        "C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H7)WpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUn"
        "nKqv(OpcDdtr~-"
        "gc3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3Id=C0YE4P0H72CfKUnnKqv(Opc"
        "DdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4UfG7n3pcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0"
        "H72CfKUnnKqv(Opeg{M6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as*#0)S8o"
        "0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0-"
        "y>3Kqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv};C<OqZ6as)y3IRYU1puHF0"
        ")S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZDgdAq0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<OqZ"
        "6as)y3IRYU1puHF0)VIjfKUnnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnopb7y"
        "%C<OqZ6as)y3IRYU1puHF0)S8o0YE4P0H72CfKUnnKqv(OpcDdtPznJ+C<=fm1puHF0)S8o0YE4P0H72CfKU"
        "nnKqv(OpcDdtPznJ+C<OqZ6as)y3IRYU1puG`|Je"
    ),
}
